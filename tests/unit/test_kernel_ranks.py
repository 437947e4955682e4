"""A notebook's ranks, with a fake shell and a fake cluster; with real ones: tests/notebooks/test_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("IPython", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench import clusters
from workbench.errors import ConfigError, LaunchError
from workbench.kernel import ranks as kernel_ranks
from workbench.kernel.ranks import Ranks


class Pending(Future[Any]):
    """An answer of ipyparallel's: it has come a moment before `wait` and `get` know of it, and this is that moment."""

    def __init__(self, cluster: FakeCluster, answer: Any = None) -> None:
        super().__init__()
        self.cluster = cluster
        if cluster.answers:
            self.set_result(answer)

    def wait(self, timeout_s: float) -> bool:
        self.cluster.waited = True
        return False

    def get(self, timeout_s: float) -> Any:
        raise TimeoutError


class Rank:
    """Answers at once, or never."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def execute(self, code: str, silent: bool, block: bool) -> Any:
        self.cluster.asked.append(code.splitlines()[-1])
        return Pending(self.cluster)

    def apply_async(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return SimpleNamespace(get=lambda timeout_s: function(*arguments))

    def pull(self, name: str, block: bool) -> Any:
        assert not block, "a wait without an end"
        return Pending(self.cluster, f"{name} of rank 0")


class FakeCluster:
    """Two ranks."""

    num_ranks = 2

    def __init__(self, state: str = "ready", answers: bool = True, name: str = "one") -> None:
        self.state, self.answers, self.id = state, answers, name
        self.waited, self.ending = False, "there"
        self.asked: list[str] = []
        self.client = [Rank(self) for _ in range(2)]

    def stop(self) -> None:
        self.ending = "stopped"

    def detach(self) -> None:
        self.ending = "detached"


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(SimpleNamespace(user_ns={}))


def given(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster) -> FakeCluster:
    monkeypatch.setattr(clusters, "attach", lambda name: cluster, raising=False)
    ranks.command("attach", cluster.id)
    return cluster


def test_a_cluster_that_trains_is_attached_without_waiting_for_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = given(ranks, monkeypatch, FakeCluster("training", answers=False))
    assert not cluster.waited and cluster.asked == ["rank, world_size = 0, 2", "rank, world_size = 1, 2"]
    assert ranks.shell.user_ns["cluster"] is cluster
    with pytest.raises(ConfigError, match="the ranks are training") as told:
        ranks.run("print(rank)")
    assert told.value._render_traceback_() == [f"ConfigError: {told.value}"]  # type: ignore[attr-defined]


def test_ranks_that_do_not_answer_are_told_with_the_way_out(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_ranks, "PREPARE_S", 0.2)
    with pytest.raises(LaunchError, match=r"the ranks of one do not answer.*%restart_ranks"):
        given(ranks, monkeypatch, FakeCluster(answers=False))


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("%%local\nprint(1)\n", ["print(1)\n"]),
        ("%%local x, y\nx\n1 / 0", ["__ranks__.prepare((), ('x', 'y'))\n", "x\n", "1 / 0"]),
        ("%ranks 2\n%%local\nx", ["__ranks__.prepare((('ranks', '2'),), ())\n", "x"]),
        (
            "%%local x\n%%time\nx\n",
            ["__ranks__.prepare((), ('x',))\n", "get_ipython().run_cell_magic('time', '', 'x\\n')\n"],
        ),
        ("%%rank 1\nx", ["__ranks__.run('%%rank 1\\nx')\n"]),
    ],
)
def test_a_local_cell_is_the_notebooks_own_behind_what_it_needs(ranks: Ranks, cell: str, lines: list[str]) -> None:
    assert ranks.transform(cell.splitlines(keepends=True)) == lines


def test_what_is_installed_is_installed_once_here(ranks: Ranks) -> None:
    asked: list[tuple[str, str]] = []
    ranks.shell.run_line_magic = lambda *words: asked.append(words)
    ranks.run("%pip install x")
    assert asked == [("pip", "install x")] and ranks.cluster is None


def test_a_local_cell_has_copies_of_rank_0(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    given(ranks, monkeypatch, FakeCluster())
    ranks.prepare((), ("x", "y"))
    assert (ranks.shell.user_ns["x"], ranks.shell.user_ns["y"]) == ("x of rank 0", "y of rank 0")


def test_rank_0_is_asked_only_while_it_is_free(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = given(ranks, monkeypatch, FakeCluster())
    assert ranks.call_on_rank0(lambda: "completed") == "completed"
    cluster.waited = False
    for state in ("training", "lost", "starting"):
        cluster.state = state
        assert ranks.call_on_rank0(lambda: "completed") is None and not cluster.waited


def test_attached_ranks_are_let_go_for_others_and_end_when_that_is_asked_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "start", lambda: None)
    for name, argument in (("ranks", "3"), ("launcher", "emulated:1gbit")):
        cluster = given(ranks, monkeypatch, FakeCluster())
        ranks.command(name, argument)
        assert (cluster.ending, capsys.readouterr().err) == (
            "detached",
            "the 2 ranks are detached: %attach one continues with them\n",
        )
    for name in ("restart_ranks", "stop_ranks"):
        cluster = given(ranks, monkeypatch, FakeCluster())
        ranks.command(name, "")
        assert cluster.ending == "stopped"


def test_a_name_that_there_is_not_costs_no_ranks(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ConfigError(f"no cluster {name}")

    cluster = given(ranks, monkeypatch, FakeCluster())
    monkeypatch.setattr(clusters, "attach", refuse)
    with pytest.raises(ConfigError, match="no cluster typo"):
        ranks.command("attach", "typo")
    assert ranks.cluster is cluster and cluster.ending == "there"
