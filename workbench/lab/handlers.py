"""What the Jupyter server answers below `workbench/api/`. Reads run in threads, so the server's event loop never waits.

| request | answer |
|---|---|
| GET clusters | the registered clusters |
| GET clusters/ID/log | the ends of its logs |
| POST clusters/ID/stop | stop it |
| GET runs?limit=&after=&curves= | rows of runs, newest first |
| GET runs/NAME?points= | a run's row, curves and failures |
| GET clusters/ID/ranks | its ranks, with what they do and use |
| POST clusters/ID/scale?ranks=, heal | the same for a detached cluster, as `workbench cluster scale` and `heal` |
| GET runs/NAME/code?after= | Python that opens, repeats, continues or branches it |
| GET runs/NAME/checkpoints | the numbers of steps after which it can be branched |
| GET runs/NAME/ranks | its ranks, with what they do and use |
| GET compare?run=&run=&points= | curves of several runs, and where their settings differ |
| GET runs/NAME/timeline?first=&last=&other=&critical= | its timeline; see `plots.trace_viewer` |
| GET timeline.js | the script that draws it |
| POST runs/NAME/pause, resume, stop | a command to the run, as `workbench steer` gives it |

The server checks the token, the origin and, for POST, the XSRF cookie. An error is {"message": one sentence}.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from workbench.clusters.commands import WITHOUT_SETTINGS, send_command
from workbench.config import value_of
from workbench.errors import ConfigError, RunNotFound, WorkbenchError
from workbench.lab.cluster_rows import ClusterRows, cluster_log, exact_entry, runs_of_clusters
from workbench.lab.rank_rows import RankRows
from workbench.lab.run_rows import RunRows
from workbench.lab.run_timeline import RunTimelines
from workbench.lab.snippets import run_code
from workbench.plots.trace_viewer.script import viewer_js
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.trace.store import runs_root

MAX_POINTS = 2000
MAX_COMPARED = 200

T = TypeVar("T")
D = TypeVar("D", int, None)


def add_handlers(server: Any) -> None:
    """Add the handlers to a Jupyter server, below its base URL."""
    state = State(Path(getattr(server, "root_dir", None) or "."))
    base = url_path_join(server.web_app.settings["base_url"], "workbench", "api")
    given = {"state": state}
    server.web_app.add_handlers(
        ".*$",
        [
            (url_path_join(base, "clusters"), Clusters, given),
            (url_path_join(base, r"timeline\.js"), TimelineJs, given),
            (url_path_join(base, "clusters", "([^/]+)", "log"), ClusterLog, given),
            (url_path_join(base, "clusters", "([^/]+)", "stop"), ClusterStop, given),
            (url_path_join(base, "clusters", "([^/]+)", "ranks"), ClusterRanks, given),
            (url_path_join(base, "clusters", "([^/]+)", "(scale|heal)"), ClusterChange, given),
            (url_path_join(base, "compare"), Compare, given),
            (url_path_join(base, "runs"), Runs, given),
            (url_path_join(base, "runs", "([^/]+)"), OneRun, given),
            (url_path_join(base, "runs", "([^/]+)", "code"), RunCode, given),
            (url_path_join(base, "runs", "([^/]+)", "checkpoints"), Checkpoints, given),
            (url_path_join(base, "runs", "([^/]+)", "ranks"), RunRanks, given),
            (url_path_join(base, "runs", "([^/]+)", "timeline"), RunTimeline, given),
            (url_path_join(base, "runs", "([^/]+)", "([a-z]+)"), Steer, given),
        ],
    )


class State:
    """What the handlers share: the rows, the stores that were seen, and threads.

    Args:
        root: the server's folder of notebooks.
    """

    def __init__(self, root: Path) -> None:
        self.rows, self.clusters, self.ranks, self.timelines = RunRows(), ClusterRows(), RankRows(), RunTimelines()
        self._root = root
        self._seen: dict[Path, Path] = {}  # a store without symbolic links -> its path as it was found first
        self.threads = ThreadPoolExecutor(4, thread_name_prefix="workbench")

    def stores(self, notebooks: list[str]) -> list[Path]:
        """Return the run stores to show: the server's, those next to open notebooks, and those of clusters' trainings.

        Without WORKBENCH_RUNS or a configuration file, a kernel's store is `runs` in its notebook's folder.

        Args:
            notebooks: paths of the notebooks with a kernel, from the server's folder.
        """
        found = [runs_root().absolute()]
        if not Path(value_of("runs") or "runs").is_absolute():
            found += [(self._root / path).parent.absolute() / "runs" for path in notebooks]
        found += [folder.parent for folder in runs_of_clusters()]
        for root in found:
            if root.is_dir():
                self._seen.setdefault(root.resolve(), root)
        return list(self._seen.values())


class Handler(APIHandler):
    """Shared parts. Polling does not count as the server's activity, so that it can end when it is idle."""

    auth_resource = "workbench"
    _track_activity = False

    def initialize(self, state: State) -> None:
        """Called by tornado for each request."""
        self.state = state

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns, called in a thread; its errors become answers."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.state.threads, work, *arguments)
        except RunNotFound as error:
            raise web.HTTPError(404, str(error)) from None
        except FileNotFoundError as error:
            raise web.HTTPError(404, f"{error.filename} no longer exists: its run was removed meanwhile") from None
        except (WorkbenchError, ValueError) as error:
            raise web.HTTPError(400, str(error)) from None

    async def stores(self) -> list[Path]:
        """Return the run stores to show."""
        return await self.in_thread(self.state.stores, list((await self.notebooks()).values()))

    async def folder_of(self, run: str) -> Path:
        """Return the folder of a run; an unknown name is answered by 404."""
        return await self.in_thread(self.state.rows.find, await self.stores(), run)

    async def notebooks(self) -> dict[int, str]:
        """Return the process of each kernel -> path of its notebook."""
        found: dict[int, str] = {}
        sessions: Any = self.session_manager
        for session in await ensure_async(sessions.list_sessions()):
            try:
                manager = self.kernel_manager.get_kernel(session["kernel"]["id"])
            except KeyError:  # ended meanwhile
                continue
            process = getattr(getattr(manager, "provisioner", None), "pid", None)
            found[process or -len(found) - 1] = str(session["path"])
        return found

    def whole(self, name: str, default: D, least: int, most: int) -> int | D:
        """Return a query argument that is a whole number, or the default without one.

        Raises:
            HTTPError: it is none, or outside the range.
        """
        text = self.get_query_argument(name, None)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or not least <= int(text[:18]) <= most:
            raise web.HTTPError(400, f"{name}={text[:20]!r}: give a whole number from {least} to {most}")
        return int(text)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send an error that says what is wrong; tornado has doubled its percent signs."""
        error = kwargs.get("exc_info", (None, None))[1]
        if isinstance(error, web.HTTPError) and error.log_message:
            self.finish(_encoded({"message": error.log_message.replace("%%", "%")}))
        else:
            super().write_error(status_code, **kwargs)

    async def answer(self, work: Callable[[], Any]) -> None:
        """Send what `work` returns as JSON; both are done in a thread."""
        self.finish(await self.in_thread(lambda: _encoded(work())))


def _encoded(content: Any) -> str:
    """Return JSON. What is no finite number becomes null, because a browser's JSON has no NaN."""
    return json.dumps(_finite(content), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


class Clusters(Handler):
    """The registered clusters."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer {"clusters": rows}."""
        notebooks = await self.notebooks()
        await self.answer(lambda: {"clusters": self.state.clusters.rows(notebooks)})


class TimelineJs(Handler):
    """The script that draws a timeline."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer its text."""
        self.set_header("Cache-Control", "private, no-cache")
        self.finish(await self.in_thread(viewer_js), set_content_type="text/javascript; charset=utf-8")


class ClusterLog(Handler):
    """The logs of a cluster."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer {"files": name and text of each}."""
        await self.answer(lambda: {"files": _known(cluster_log, name)})


class ClusterStop(Handler):
    """Ends a cluster."""

    @web.authenticated
    @authorized
    async def post(self, name: str) -> None:
        """Answer {"message": what was ended}."""
        await self.answer(lambda: {"message": _known(self.state.clusters.stop, name)})


class ClusterRanks(Handler):
    """The ranks of a cluster."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer {"ranks", "run", "status"}: see `RankRows`."""
        await self.answer(lambda: self.state.ranks.of_cluster(_known(exact_entry, name)))


class ClusterChange(Handler):
    """Scales or heals a detached cluster."""

    @web.authenticated
    @authorized
    async def post(self, name: str, action: str) -> None:
        """Answer {"message": what was changed}."""
        number = self.whole("ranks", None, 1, 4096)
        if action == "scale" and number is None:
            raise web.HTTPError(400, "scale: give the number of ranks, such as ranks=4")
        arguments = [str(number)] if action == "scale" else []
        await self.answer(
            lambda: {"message": _known(lambda one: self.state.clusters.change(one, action, *arguments), name)}
        )


def _known(work: Callable[[str], T], name: str) -> T:
    """Call `work` with a cluster's id; an unknown one is `RunNotFound`, which the browser gets as 404."""
    try:
        return work(name)
    except ConfigError as error:
        raise RunNotFound(str(error)) from None


class Runs(Handler):
    """The runs of the stores."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer the rows: see `RunRows.select`."""
        limit, after = self.whole("limit", None, 1, 10**6), self.whole("after", 0, 0, 2**53)
        curves = self.get_query_argument("curves", "0") == "1"
        stores = await self.stores()
        await self.answer(lambda: self.state.rows.select(stores, limit=limit, after=after, curves=curves))


class OneRun(Handler):
    """A run with its curves."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer the run: see `RunRows.one`."""
        points, folder = self.whole("points", 400, 10, MAX_POINTS), await self.folder_of(name)
        await self.answer(lambda: self.state.rows.one(folder, points))


class RunCode(Handler):
    """Python that uses a run."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer {"open", "repeat", "continue", "branch"}, those that are possible."""
        after, folder = self.whole("after", None, 0, 10**15), await self.folder_of(name)
        await self.answer(lambda: run_code(folder, self.state.rows.info(folder), after))


class Checkpoints(Handler):
    """The checkpoints of a run."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer {"steps": the number of steps of each complete checkpoint, the newest first}."""
        folder = await self.folder_of(name)

        def steps() -> dict[str, list[int]]:
            found = (one.num_steps for one in complete_checkpoints(folder))
            return {"steps": list(dict.fromkeys(number for number in found if number >= 0))}

        await self.answer(steps)


class RunRanks(Handler):
    """The ranks of a run."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer {"ranks", "run", "status"}: see `RankRows`."""
        folder = await self.folder_of(name)
        await self.answer(lambda: self.state.ranks.of_run(folder))


class Compare(Handler):
    """Several runs on the same axes."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer the curves: see `RunRows.compare`."""
        names = list(dict.fromkeys(self.get_query_arguments("run")))
        if not 1 <= len(names) <= MAX_COMPARED:
            raise web.HTTPError(400, f"give 1 to {MAX_COMPARED} runs to compare, not {len(names)}")
        points, stores, rows = self.whole("points", 300, 10, MAX_POINTS), await self.stores(), self.state.rows
        await self.answer(lambda: rows.compare([rows.find(stores, name) for name in names], points))


class RunTimeline(Handler):
    """What the ranks of a run did, and when."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer the content for a viewer: see `RunTimelines.of`."""
        first, last = self.whole("first", None, 0, 10**9), self.whole("last", None, 0, 10**9)
        critical, other = self.get_query_argument("critical", "0") == "1", self.get_query_argument("other", None)
        steps = None if first is None and last is None else slice(first, last)
        folders = [await self.folder_of(one) for one in (name, other) if one]
        await self.answer(lambda: self.state.timelines.of(folders, steps, critical=critical))


class Steer(Handler):
    """Pauses, resumes or stops a run."""

    @web.authenticated
    @authorized
    async def post(self, name: str, command: str) -> None:
        """Answer {"message"}. The command takes effect at the end of a step."""
        if command not in WITHOUT_SETTINGS:
            hint = "; `stop` writes a checkpoint" if command == "checkpoint" else ""
            raise web.HTTPError(400, f"there is no command {command}: give {', '.join(WITHOUT_SETTINGS)}{hint}")
        folder = await self.folder_of(name)

        def give() -> dict[str, str]:
            send_command(folder, {command: True})
            return {"message": f"{name}: asked to {command} at the end of a step"}

        await self.answer(give)
