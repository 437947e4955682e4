"""Seconds of compute on the command line and in sweeps: real ranks sleep for them, simulated workers take them."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.cli.main import main
from workbench.costs import Compute, Lognormal
from workbench.errors import ConfigError
from workbench.experiments.grid import read_grid
from workbench.run_spec import check_train, compute_of, parse_train, resolve
from workbench.trace.run import Run

COMPUTE = ["--compute", "forward_s=0.03", "--compute", "backward_s=0.07"]
TRAIN = ["synchronous-sgd", "--problem", "digits-softmax", "--steps", "2"]


def test_seconds_and_stragglers_become_a_setting() -> None:
    options = parse_train([*TRAIN, "--runtime", "torch", *COMPUTE, "--stragglers", "lognormal:0.3"])
    settings = resolve(options)[-1]
    assert settings.compute == Compute(forward_s=0.03, backward_s=0.07, stragglers=(Lognormal(sigma=0.3),))
    assert resolve(parse_train([*TRAIN, "--runtime", "torch"]))[-1].compute is None
    assert compute_of(["backward_s=0.07"], []) == Compute(forward_s=0.0, backward_s=0.07)


@pytest.mark.parametrize("runtime", ["torch", "simulated"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compute", "forwards=1"], "--compute has no .*forwards"),
        (["--compute", "forward_s=-1"], "seconds must be 0 or more"),
        (["--compute", "forward_s=much"], "forward_s"),
        (["--compute", "forward_s"], "write it as name=value"),
        ([*COMPUTE, "--compute", "stragglers=lognormal"], "give them by --stragglers"),
        ([*COMPUTE, "--stragglers", "lognormall:0.3"], "did you mean lognormal"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(runtime: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_train([*TRAIN, "--runtime", runtime, *words])


def test_stragglers_of_real_ranks_need_seconds() -> None:
    words = [*TRAIN, "--stragglers", "lognormal:0.3"]
    with pytest.raises(ConfigError, match="stragglers multiply the seconds of compute: give these too"):
        check_train([*words, "--runtime", "mpi"])
    check_train([*words, "--runtime", "simulated"])


def test_simulated_workers_take_the_seconds_and_do_not_sleep(runs: Path) -> None:
    assert main(["train", *TRAIN, "--runtime", "simulated", "--network", "free", *COMPUTE]) == 0
    run = Run.load(next(runs.iterdir()))
    assert not run.slept and "slept" not in str(run.info["notes"])
    forward = run.spans.select(kinds=["forward"]).table
    assert (forward["end_s"] - forward["start_s"]).tolist() == pytest.approx([0.03] * len(forward))


def test_a_sweep_varies_the_seconds() -> None:
    base = {"algorithm": "pipe-sgd", "steps": 2, "runtime": "torch", "compute": {"forward_s": 0.03}}
    axes = {"compute.backward_s": [0.03, 0.07], "stragglers": ["lognormal:0.3", "uniform:0.5,2"]}
    grid = read_grid({"name": "slept", "base": base, "axes": axes})
    made = [resolve(parse_train(cell.train_arguments()[1:]))[-1].compute for cell in grid.cells]
    assert [one.backward_s for one in made] == [0.03, 0.03, 0.07, 0.07] and {one.forward_s for one in made} == {0.03}
    assert len({str(one.stragglers) for one in made}) == 2
    with pytest.raises(ConfigError, match="--compute has no"):
        read_grid({"name": "slept", "base": {**base, "compute": {"forward": 0.03}}})
