"""What a cell on real ranks can do: ask, show widgets and progress, print much, explain, be interrupted, be debugged."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernel_client import CELL_S, COLOURS, Notebook, start_notebook

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.timeout(300)]
WIDGET = "application/vnd.jupyter.widget-view+json"
STOPPING = "%%rank 0-1\nvalue = 10 + rank\ndoubled = 2 * value\nprint(doubled)"


# ---------------------------------------------------------------- questions


def wait_for_each_other(notebook: Notebook, seconds: float) -> None:
    """How long a question of a rank waits for the same one of others."""
    assert notebook.cell(f"%%local\nfrom workbench.kernel import questions\nquestions.HOLD_S = {seconds}")[1] == ""


def test_a_question_of_all_ranks_is_asked_once_and_answered_to_all(notebook: Notebook) -> None:
    wait_for_each_other(notebook, 60)
    text, error, _ = notebook.cell("print('hello', input('name? '))", answers=["Ada"])
    assert (error, notebook.asked) == ("", ["[0-1] name? "])
    assert {line.split("] ")[1] for line in text.splitlines()} == {"hello Ada"}


def test_a_rank_that_asks_late_gets_the_answer_that_the_other_had(notebook: Notebook) -> None:
    wait_for_each_other(notebook, 0.3)
    code = "import time\nif rank == 1:\n    time.sleep(3)\nprint(input('a? '), input('a? '))"
    text, error, _ = notebook.cell(code, answers=["one", "two"])
    assert (text.splitlines()[-1].endswith("one two"), error, notebook.asked) == (True, "", ["[0] a? ", "[0] a? "])
    assert {line.split("] ")[1] for line in text.splitlines()} == {"one two"}


def test_one_rank_asks_and_pdb_too(notebook: Notebook) -> None:
    code = "%%rank 1\nimport pdb\ndef f():\n    inside = 41\n    pdb.set_trace()\n    return inside\nf()"
    text, error, _ = notebook.cell(code, answers=["p inside + 1", "c"])
    assert error == "" and "[1] 42" in text.splitlines()
    assert notebook.asked == ["[1] (Pdb) "] * 2


def test_a_front_end_that_cannot_ask_is_an_error_that_says_so(notebook: Notebook) -> None:
    error = notebook.cell("input('name? ')")[1]
    assert error.splitlines()[0] == "On ranks 0-1:"
    assert "StdinNotImplementedError: " in error and error.endswith("It cannot ask for 'name? '.")


# ---------------------------------------------------------------- output


def test_a_progress_bar_of_each_rank_moves_in_one_place(notebook: Notebook) -> None:
    code = (
        "import sys, time\nfor i in range(20):\n    sys.stderr.write(f'\\r{i + 1} of 20')\n    sys.stderr.flush()\n"
        "    time.sleep(0.1)\n_ = sys.stderr.write('\\n')"
    )
    text, error, _ = notebook.cell(code)
    assert ({line.split("] ")[1] for line in text.splitlines()}, error) == ({"20 of 20"}, "")
    shown = [message for message in notebook.messages if message["msg_type"].endswith("display_data")]
    bars = [message["content"]["data"]["text/plain"] for message in shown]
    assert len({message["content"]["transient"]["display_id"] for message in shown}) == 1
    assert any(re.fullmatch(r"\[0\] \d+ of 20\n\[1\] \d+ of 20", bar) for bar in bars), bars
    assert bars[-1] == "" and len(bars) > 3


def test_much_text_is_few_messages_and_a_file(notebook: Notebook, environment: dict[str, str]) -> None:
    text, error, _ = notebook.cell("for i in range(50_000):\n    print('line', i)")
    assert error == "" and len(text) < 500_000 and len(notebook.messages) < 200
    left_out, path = re.findall(r"\.\.\. ([\d,]+) more lines .* is in (\S+)\. The last lines:", text)[0]
    lines = Path(path).read_text().splitlines()
    in_file = set(lines)
    printed: dict[int, list[int]] = {0: [], 1: []}  # a line that both ranks print at about the same time is one line
    for ranks, number in re.findall(r"^\[([\d-]+)\] line (\d+)$", "\n".join(lines), re.MULTILINE):
        for rank in {"0": (0,), "1": (1,), "0-1": (0, 1)}[ranks]:
            printed[rank].append(int(number))
    whole = printed[0] == printed[1] == list(range(50_000))
    assert whole, "pytest's difference of such lists would take minutes"
    assert text.splitlines()[-1] == lines[-1]
    assert int(left_out.replace(",", "")) == len(lines) - sum(line in in_file for line in text.splitlines()[:-20])
    assert Path(path).is_relative_to(environment["WORKBENCH_RUNS"])


def test_a_long_line_is_cut(notebook: Notebook) -> None:
    text, error, _ = notebook.cell("print('x' * 2_000_000)")
    assert error == "" and len(text) < 10_000
    assert "(2.0 MB)" in text or "(4.0 MB)" in text, "of each rank, or of both if they print at the same moment"


def test_displays_change_and_outputs_are_cleared(notebook: Notebook) -> None:
    assert notebook.cell("%%rank 1\nhandle = display('first', display_id=True)\nhandle.update('second')")[1] == ""
    first, second = [message for message in notebook.messages if message["msg_type"].endswith("display_data")]
    assert first["content"]["transient"] == second["content"]["transient"]
    assert (second["msg_type"], second["content"]["data"]["text/plain"]) == ("update_display_data", "'second'")
    code = "from IPython.display import clear_output\nprint('gone')\nclear_output(wait=True)\nprint('stays')"
    assert notebook.cell(code)[1] == ""
    assert [message["msg_type"] for message in notebook.messages].count("clear_output") == 1


# ---------------------------------------------------------------- widgets


def test_a_widget_of_a_rank_is_heard_and_its_callback_runs_on_the_rank(notebook: Notebook) -> None:
    code = (
        "%%rank 1\nimport ipywidgets\nslider = ipywidgets.IntSlider()\n"
        "slider.observe(lambda change: print('now', change.new, 'on', rank), 'value')\n"
        "print(slider.comm.comm_id)\nslider"
    )
    text, error, kinds = notebook.cell(code)
    assert error == "" and WIDGET in kinds
    name = text.split()[1]
    assert name in [message["content"].get("comm_id") for message in notebook.messages]
    moved = {"comm_id": name, "data": {"method": "update", "state": {"value": 7}, "buffer_paths": []}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", moved))
    heard = notebook.hear_until(lambda message: message["content"].get("text") == "[1] now 7 on 1\n")
    assert heard["parent_header"]["msg_type"] == "execute_request", "a front end shows what belongs to a cell"
    assert notebook.cell("%%rank 1\nslider.value = 9\nprint(slider.value)")[0] == "[1] now 9 on 1\n[1] 9\n"
    (update,) = [message for message in notebook.messages if message["msg_type"] == "comm_msg"]
    assert (update["content"]["comm_id"], update["content"]["data"]["state"]) == (name, {"value": 9})


def test_a_bar_of_tqdm_is_one_widget_for_each_rank(notebook: Notebook) -> None:
    text, error, kinds = notebook.cell("from tqdm.notebook import tqdm\nfor _ in tqdm(range(3)):\n    pass")
    assert (sorted(text.split()), error, kinds.count(WIDGET)) == (["[0]", "[1]"], "", 2)  # ranks answer in any order


# ---------------------------------------------------------------- help


def test_help_is_a_page_and_commands_are_completed_and_explained(notebook: Notebook) -> None:
    def page(code: str) -> str:
        assert notebook.cell(code)[1] == ""
        (payload,) = notebook.reply["content"]["payload"]
        assert payload["source"] == "page"
        return COLOURS.sub("", payload["data"]["text/plain"])

    assert notebook.cell("def on_ranks(x):\n    'Doubles.'\n    return 2 * x")[1] == ""
    assert "Doubles." in page("on_ranks?") and "return 2 * x" in page("on_ranks??")
    assert "let breakpoints stop this rank" in page("%debug_rank?")
    assert "%debug_rank" in notebook.ask("complete", "%debug_r", 8)["matches"]
    assert "%%rank" in notebook.ask("complete", "%%ran", 5)["matches"]
    assert notebook.cell("print(get_ipython().run_line_magic('lsmagic', ''))")[0].count("%variables") in (1, 2), (
        "once, or of each rank if they do not print at the same time"
    )
    assert "above the code of a cell" in notebook.cell("x = 1\n%status")[1]


def test_variables_are_one_table(notebook: Notebook) -> None:
    assert notebook.cell("import torch\nsame = torch.ones(2, 3)\nother = torch.full((2,), float(rank))")[1] == ""
    _, error, kinds = notebook.cell("%variables same, other")
    assert (error, kinds) == ("", ["text/html", "text/plain"])
    (shown,) = [message["content"]["data"] for message in notebook.messages if message["msg_type"] == "display_data"]
    table = shown["text/plain"].splitlines()
    assert [re.split(r"  +", row.strip()) for row in table[1:]] == [
        ["other", "Tensor", "(2,)", "float32", "cpu", "8 B", "no: 0 | 1"],
        ["same", "Tensor", "(2, 3)", "float32", "cpu", "24 B", "yes"],
    ]


# ---------------------------------------------------------------- interrupts


@pytest.mark.parametrize(
    "code",
    [
        "while rank == 1:\n    pass",
        "import time\nif rank == 1:\n    time.sleep(1000)",
        "import torch\nsquare = torch.ones(500, 500)\nwhile rank == 1:\n    square @ square",
        "import subprocess\nif rank == 1:\n    subprocess.run(['sleep', '1000'])",
        "import threading\nif rank == 1:\n    threading.Event().wait()",
    ],
)
def test_one_rank_that_does_not_end_is_interrupted(notebook: Notebook, code: str) -> None:
    text, error, _ = notebook.cell(f"print('begun')\n{code}", interrupt_when="begun")
    assert error == "KeyboardInterrupt" and "does not react" not in text
    assert notebook.cell("print('free')")[0] == "[0-1] free\n"


def test_an_interrupt_between_a_cell_s_end_and_its_reply_loses_no_reply(notebook: Notebook) -> None:
    code = (
        "import os, signal, threading, time\ndef interrupts():\n    ended.wait()\n    for _ in range(50):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(0.001)\n"
        "ended = threading.Event()\nthread = threading.Thread(target=interrupts)\nthread.start()\n"
        "get_ipython().events.register('post_execute', ended.set)"
    )
    assert notebook.cell(code)[1] == ""
    time.sleep(1)  # until the last interrupt, which would end another cell
    assert notebook.cell("thread.join(); get_ipython().events.unregister('post_execute', ended.set)")[1] == ""


# ---------------------------------------------------------------- the debugger


def stopping(notebook: Notebook, *lines: int) -> None:
    """Switch the debugger on, with breakpoints in lines of `STOPPING`."""
    if not notebook.debug("debugInfo")["body"]["isStarted"]:
        assert notebook.debug("initialize")["success"] and notebook.debug("attach")["success"]
    path = notebook.debug("dumpCell", code=STOPPING)["body"]["sourcePath"]
    breakpoints = [{"line": line} for line in lines]
    assert notebook.debug("setBreakpoints", source={"path": path}, breakpoints=breakpoints)["success"]
    assert notebook.debug("configurationDone")["success"]


def frame_of(notebook: Notebook) -> dict[str, Any]:
    """The frame in which the rank that is shown has stopped."""
    found = notebook.debug("stackTrace", threadId=1)["body"]["stackFrames"][0]
    assert found["source"]["path"] == notebook.debug("dumpCell", code=STOPPING)["body"]["sourcePath"]
    return dict(found)


def variables_of(notebook: Notebook, frame: dict[str, Any]) -> dict[str, str]:
    scope = notebook.debug("scopes", frameId=frame["id"])["body"]["scopes"][0]
    found = notebook.debug("variables", variablesReference=scope["variablesReference"])["body"]["variables"]
    return {variable["name"]: variable["value"] for variable in found}


def ended(notebook: Notebook) -> str:
    """The status of the cell that was sent last."""
    while (reply := notebook.client.get_shell_msg(timeout=CELL_S))["msg_type"] != "execute_reply":
        pass
    return str(reply["content"]["status"])


def test_a_breakpoint_stops_the_chosen_rank_and_no_other(notebook: Notebook) -> None:
    assert notebook.cell("%debug_rank 1")[1] == ""
    stopping(notebook, 3)
    notebook.client.execute(STOPPING, stop_on_error=False)
    others = {"[0] 20\n", "stopped"}  # the other rank runs to its end

    def all_heard(message: dict[str, Any]) -> bool:
        others.difference_update(map(str, message["content"].values()))
        return not others

    notebook.hear_until(all_heard)
    frame = frame_of(notebook)
    assert (frame["name"], frame["line"]) == ("rank 1: <module>", 3), "the line of the cell as it was typed"
    assert variables_of(notebook, frame)["value"] == "11"
    notebook.debug("next", threadId=1)
    notebook.event("stopped")
    frame = frame_of(notebook)
    assert frame["line"] == 4 and variables_of(notebook, frame)["doubled"] == "22"
    found = notebook.debug("evaluate", expression="doubled + rank", frameId=frame["id"], context="repl")
    assert found["body"]["result"] == "23"
    notebook.debug("continue", threadId=1)
    assert ended(notebook) == "ok"
    found = notebook.debug("inspectVariables")["body"]["variables"]
    assert {"doubled": "22"}.items() <= {each["name"]: each["value"] for each in found}.items(), "of rank 1"
    assert notebook.debug("disconnect")["success"]
    assert notebook.cell(STOPPING)[0].splitlines() == ["[0] 20", "[1] 22"]


def test_all_ranks_stop_and_are_shown_one_after_another_also_after_a_restart(notebook: Notebook) -> None:
    assert notebook.cell("%debug_rank all")[1] == ""
    stopping(notebook, 3)
    for restarted in (False, True):
        if restarted:
            assert notebook.cell("%restart_ranks")[1] == ""
        notebook.client.execute(STOPPING, stop_on_error=False)
        shown = []
        for _ in range(2):
            notebook.event("stopped")
            shown.append(frame_of(notebook)["name"])
            notebook.debug("continue", threadId=1)
        assert sorted(shown) == ["rank 0: <module>", "rank 1: <module>"]
        assert ended(notebook) == "ok"
    assert notebook.debug("disconnect")["success"]


def test_a_rank_that_has_stopped_is_interrupted_and_stops_again(notebook: Notebook) -> None:
    assert notebook.cell("%debug_rank 0")[1] == ""
    stopping(notebook, 3)
    for _ in range(2):
        notebook.client.execute(STOPPING, stop_on_error=False)
        notebook.event("stopped")
        notebook.manager.interrupt_kernel()
        assert ended(notebook) == "error"
    assert notebook.debug("disconnect")["success"]
    assert notebook.cell("print('free')")[0] == "[0-1] free\n"


def test_cells_are_traced_only_while_the_debugger_is_on(notebook: Notebook) -> None:
    cell = "%%rank 0\nimport sys\nprint('traced' if sys.gettrace() else 'free')"
    failing = (
        "%%rank 0\nimport sys\nclass Failure(Exception):\n    def __str__(self):\n"
        "        return 'traced' if sys.gettrace() else 'free'\nraise Failure"
    )
    assert notebook.cell("%debug_rank 0")[1] == ""
    stopping(notebook, 3)
    assert notebook.cell(cell)[0] == "[0] traced\n"
    assert notebook.cell(failing)[1].endswith("Failure: free")
    assert notebook.cell(cell)[0] == "[0] traced\n"
    assert notebook.debug("disconnect")["success"]
    assert notebook.cell(cell)[0] == "[0] free\n"


@pytest.mark.usefixtures("no_process_left")
def test_a_restart_of_the_kernel_leaves_no_process_of_a_debugger(environment: dict[str, str]) -> None:
    mark = {"WORKBENCH_TEST_MARK": os.environ["WORKBENCH_TEST_MARK"], "WORKBENCH_RANKS": "1"}
    own = start_notebook({**environment, **mark})
    stopping(own, 3)
    own.client.execute(STOPPING.replace("0-1", "0"))
    pid = own.manager.provisioner.pid  # type: ignore[union-attr]
    time.sleep(1)
    os.kill(pid, signal.SIGINT)
    own.manager.restart_kernel()
    own.client.wait_for_ready(timeout=CELL_S)
    own.close()
