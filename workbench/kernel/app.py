"""The kernel: IPython's kernel with cells that run on ranks.

python -m workbench.kernel -f CONNECTION_FILE
"""

from __future__ import annotations

from typing import Any, final

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.inputtransformer2 import TransformerManager

from workbench.kernel.cells import parse_cell
from workbench.kernel.debugger import NotebookDebugger
from workbench.kernel.ranks import Ranks


@final
class RanksKernel(IPythonKernel):
    """Cells run on all ranks. Rank 0 answers completion and inspection when it is free, else the kernel itself."""

    implementation = "workbench"
    banner = (
        "Cells run on all ranks of a cluster: %ranks N, %%rank 0,2, %%local, %status, %restart_ranks, %launcher, "
        "%attach, %detach"
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self.ranks = Ranks.attach_to(self.shell)
        self.ranks.debugger = NotebookDebugger(self)
        self._plain = TransformerManager()  # type: ignore[no-untyped-call]

    def do_complete(self, code: str, cursor_pos: int | None) -> Any:
        answer = None
        if not _is_local(code):
            answer = self.ranks.call_on_rank0(_complete, code, len(code) if cursor_pos is None else cursor_pos)
        return answer or super().do_complete(code, cursor_pos)  # type: ignore[no-untyped-call]

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        answer = None if _is_local(code) else self.ranks.call_on_rank0(_inspect, code, cursor_pos, detail_level)
        if answer and answer.get("found"):
            return answer
        return super().do_inspect(code, cursor_pos, detail_level, omit_sections)  # type: ignore[no-untyped-call]

    async def do_debug_request(self, msg: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the front end's debugger, whose breakpoints stop ranks."""
        assert self.ranks.debugger is not None
        session = self.ranks.debugger.session
        answer = await session.answer(msg)
        if msg["command"] == "attach" and self.ranks.free():
            try:
                await session.update()
            except Exception as error:  # noqa: BLE001 - of a rank; the front end waits for an answer
                return {**answer, "success": False, "message": f"{type(error).__name__}: {error}"}
        return answer

    def do_is_complete(self, code: str) -> Any:
        """Check the cell as the user typed it, because the transformed cell is always complete."""
        status, indent = self._plain.check_complete(code)
        return {"status": status, "indent": " " * (indent or 0)} if status == "incomplete" else {"status": status}

    async def do_shutdown(self, restart: bool) -> Any:
        assert self.ranks.debugger is not None
        await self.ranks.debugger.session.release()  # attached ranks continue, and no breakpoint may stop them
        self.ranks.stop()
        return super().do_shutdown(restart)  # type: ignore[no-untyped-call]


def _is_local(code: str) -> bool:
    try:
        return parse_cell(code).local
    except Exception:  # noqa: BLE001 - an incomplete cell may raise any error
        return False


def _complete(code: str, cursor_pos: int) -> Any:
    """Answer a completion. Runs on rank 0."""
    from IPython import get_ipython

    return get_ipython().kernel.do_complete(code, cursor_pos)


def _inspect(code: str, cursor_pos: int, detail_level: int) -> Any:
    """Answer an inspection. Runs on rank 0."""
    from IPython import get_ipython

    return get_ipython().kernel.do_inspect(code, cursor_pos, detail_level)


def main() -> None:
    """Run the kernel for a connection file."""
    IPKernelApp.launch_instance(kernel_class=RanksKernel)
