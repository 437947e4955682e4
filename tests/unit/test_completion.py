"""Shell completion: in a real bash and zsh, of commands, options and names, and without torch."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench import algorithms, codecs, collectives, problems, resources
from workbench.cli import completion
from workbench.trace.store import new_run

SETUP = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "PS1='> '"),
    "zsh": (["zsh", "-f", "-i"], "PS1='> '; autoload -U compinit; compinit -u"),
}


@pytest.fixture
def command(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program `workbench` on the path. In its environment, an import of torch or numpy leaves a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torch", "numpy"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"open({str(tmp_path / 'heavy')!r}, 'a').write({name!r})\n")
    program = folder / "workbench"
    paths = os.pathsep.join([str(folder), str(resources.PACKAGE.parent)])
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" -m workbench "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return str(program)


def completions(command: str, line: str) -> set[str]:
    """What the program answers to a shell."""
    read, write = os.pipe()
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_IFS": "\n"}
    variables |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    script = f"exec {command} 8>&{write} 9>/dev/null"
    subprocess.run(["bash", "-c", script], env={**os.environ, **variables}, pass_fds=[write], check=True, timeout=60)
    os.close(write)
    with os.fdopen(read) as answer:
        return set(answer.read().split("\n")) - {""}


def test_names_are_those_of_the_registries(command: str, tmp_path: Path) -> None:
    name = new_run({"algorithm": {"name": "PipeSGD"}}).name
    assert completions(command, "workbench train ") == set(algorithms.names())
    assert completions(command, "workbench codecs ") == set(codecs.names())
    assert completions(command, "workbench collectives ") == set(collectives.names())
    for line in ("workbench train pipe-sgd --problem ", "workbench study --problem ", "workbench problems "):
        assert completions(command, line) == set(problems.names())
    for line in ("workbench show ", "workbench runs export ", "workbench train pipe-sgd --resume "):
        assert completions(command, line) == {name, "last"}
    assert completions(command, "workbench notebook run 0") == {one for one in resources.notebooks() if one[0] == "0"}
    assert {"all", "li2018pipesgd", "00-tour"} <= completions(command, "workbench reproduce ")
    assert completions(command, "workbench tr") == {"train"}
    assert completions(command, "workbench train pipe-sgd --on-f") == {"--on-failure"}
    assert completions(command, "workbench papers check --qu") == {"--quiet"}
    assert not (tmp_path / "heavy").exists(), "torch or numpy was imported"


def test_no_names_without_notebooks_and_with_damaged_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    defaults = tmp_path / "config.toml"
    defaults.write_text("runs = 3\nno such thing\n")
    monkeypatch.setenv("WORKBENCH_CONFIG", str(defaults))
    assert completion._completions(completion._runs) == []
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "workbench")
    assert completion._completions(completion.NAMES["notebook words"]) == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_what_is_typed(shell: str, command: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}: apt-get install {shell}")
    argv, setup = SETUP[shell]
    master, slave = pty.openpty()
    about = {"stdin": slave, "stdout": slave, "stderr": slave, "env": {**os.environ, "TERM": "vt100"}}
    with subprocess.Popen(argv, **about, start_new_session=True) as process:
        os.close(slave)
        try:
            os.write(master, f'{setup}; eval "$(workbench completion {shell})"; echo re""ady\n'.encode())
            heard(master, "ready")
            os.write(master, b"workbench train adaptive-d\t")
            heard(master, "adaptive-delay-sgd")
            os.write(master, b"--problem wide\t")
            heard(master, "wide-mlp")
        finally:
            process.kill()
            os.close(master)


def heard(terminal: int, words: str) -> None:
    """Wait until a terminal shows these words."""
    shown, deadline = "", time.monotonic() + 60
    while words not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
