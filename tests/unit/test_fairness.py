"""Notes below a table of runs: failures, the rank whose parameters are evaluated, learning rates that cannot be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.laws import tiny
from workbench.algorithms import AsyncSGD, BackupSGD, NoCommunication, PipeSGD, SoftsyncSGD, SynchronousSGD
from workbench.analysis import compare
from workbench.analysis.fairness import updates_per_batch
from workbench.analysis.labels import distinct_labels
from workbench.analysis.runs_table import runs_table
from workbench.codecs import Linear8
from workbench.collectives import Ring
from workbench.costs import Compute, Network
from workbench.plots import curves
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

WORKERS = 4


def simulated(algorithm: Algorithm, lr: float = 0.1, **settings: int) -> Run:
    how = Settings(
        **{"steps": 6, "batch_size": 2, "evaluate_every": 2, "lr": lr, "seed": 1, **settings}, optimizer=torch.optim.SGD
    )  # type: ignore[arg-type]
    network, compute = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e9), Compute(forward_s=0.3, backward_s=0.7)
    return Simulation(algorithm, tiny.problem(), how, WORKERS, network=network, compute=compute).run()


def failed(run: Run, error: str = "rank 1: mat1 and mat2 shapes cannot be multiplied\nmore") -> Run:
    return replace(run, info={**run.info, "status": "failed", "error": error})


def rates_note_of(*runs: Run) -> str:
    return "".join(note for note in compare(runs).footnotes if "Learning rates" in note)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (SynchronousSGD(), 1),
        (BackupSGD(backups=1), 1),
        (AsyncSGD(), WORKERS),
        (AsyncSGD(shards=2), WORKERS),
        (SoftsyncSGD(splits=2), 2),
    ],
)
def test_updates_for_each_global_batch(algorithm: Algorithm, expected: int) -> None:
    assert updates_per_batch(simulated(algorithm)) == expected


def test_rates_that_are_not_comparable_are_named_with_the_rate_that_is() -> None:
    synchronous = simulated(SynchronousSGD())
    note = rates_note_of(synchronous, simulated(AsyncSGD()))
    assert "AsyncSGD" in note
    assert "lr=0.025" in note, "lr / p"
    assert rates_note_of(synchronous, simulated(AsyncSGD(), lr=0.1 / WORKERS)) == "", "quiet where they are"
    assert rates_note_of(synchronous, simulated(SynchronousSGD(), lr=0.4)) == "", (
        "a rate may be compared with another of one algorithm"
    )
    assert rates_note_of(synchronous, simulated(BackupSGD(backups=1))) == ""
    assert "Learning rates" in compare([synchronous, simulated(AsyncSGD())])._repr_html_()


def test_a_rate_counts_that_an_algorithm_divides_gradients_by_their_staleness() -> None:
    """Of the p gradients for an update of synchronous SGD, each is stale by about p - 1, and so counts 1 / (p - 1)."""
    synchronous = simulated(SynchronousSGD(), steps=40)
    plain = rates_note_of(synchronous, simulated(SoftsyncSGD(splits=WORKERS, divide=False), steps=40))
    assert "compare it at about lr=0.025" in plain, "lr / p"
    divided = rates_note_of(synchronous, simulated(SoftsyncSGD(splits=WORKERS), steps=40))
    fair = float(divided.split("compare it at about lr=")[1].rstrip("."))
    assert 0.1 * (WORKERS - 1) / WORKERS * 0.8 < fair < 0.1 * (WORKERS - 1) / WORKERS


def test_a_table_says_whose_parameters_are_evaluated() -> None:
    table = compare([simulated(SynchronousSGD()), simulated(AsyncSGD()), simulated(NoCommunication())])
    notes = "\n".join(table.footnotes)
    assert "AsyncSGD: accuracy is of the servers' parameters" in notes
    assert "NoCommunication: accuracy is of rank 0's replica alone" in notes
    assert "SynchronousSGD: accuracy" not in notes
    assert "slow worker that ends alone counts" in notes
    assert "staleness: the largest" in notes


def test_a_learning_rate_is_in_the_labels_where_it_differs() -> None:
    runs = [simulated(SynchronousSGD()), simulated(AsyncSGD(), lr=0.025)]
    assert distinct_labels(runs) == ["SynchronousSGD, lr=0.1", "AsyncSGD, lr=0.025"]
    assert distinct_labels([runs[0], simulated(AsyncSGD())]) == ["SynchronousSGD", "AsyncSGD"]


def test_a_collective_and_a_codec_that_are_not_the_default_are_in_the_labels() -> None:
    plain, coded = simulated(PipeSGD(width=2)), simulated(PipeSGD(width=2, collective=Ring(codec=Linear8())))
    assert [plain.label, coded.label] == ["PipeSGD(width=2)", "PipeSGD(width=2, collective=ring:linear8)"]
    assert coded.label in str(compare([coded])) and distinct_labels([plain, coded]) == [plain.label, coded.label]
    assert simulated(SynchronousSGD()).label == "SynchronousSGD", "its first setting is always recorded"
    stochastic = simulated(PipeSGD(width=2, collective=Ring(codec=Linear8(rounding="stochastic"))))
    assert len(set(distinct_labels([coded, stochastic]))) == 2


def test_a_damaged_learning_rate_has_a_label() -> None:
    runs = [Run(info={"algorithm": {"name": "PipeSGD"}, "settings": {"lr": rate}}, metrics={}) for rate in ([], 0.1)]
    assert distinct_labels(runs) == ["PipeSGD, lr=[]", "PipeSGD, lr=0.1"]


def test_a_failed_run_looks_failed() -> None:
    run = failed(simulated(SynchronousSGD()))
    words = "failed after step 5: rank 1: mat1 and mat2 shapes cannot be multiplied"
    assert run.failure_summary == words
    assert words in repr(run)
    table = compare([run, simulated(AsyncSGD())])
    assert words in str(table)
    assert words in table._repr_html_()
    assert [cells[1] for cells in table.cells()] == ["failed", "finished"]
    figure = curves([run])
    assert "rank 1: mat1" in figure.layout.annotations[-1].text
    assert figure.data[-1].name == "SynchronousSGD, failed"
    empty = replace(failed(run), metrics={})
    assert "rank 1: mat1" in curves([empty]).layout.annotations[-1].text, "empty axes say why"


def test_the_list_of_runs_says_what_failed(tmp_path: Path) -> None:
    run = failed(simulated(SynchronousSGD()))
    run.save(tmp_path / "one")
    simulated(AsyncSGD()).save(tmp_path / "two")
    assert runs_table(root=tmp_path).footnotes == (
        "one: failed after step 5: rank 1: mat1 and mat2 shapes cannot be multiplied",
    )


def test_a_run_that_did_not_fail_has_no_trouble() -> None:
    run = simulated(SynchronousSGD())
    assert run.failure_summary == ""
    assert not curves([run]).layout.annotations


def test_a_mean_is_of_finished_runs_of_one_length(tmp_path: Path) -> None:
    long, again, short = (
        simulated(SynchronousSGD(), seed=seed, steps=steps) for seed, steps in ((1, 6), (2, 6), (3, 3))
    )
    live = replace(simulated(SynchronousSGD(), seed=4), info={**long.info, "status": "running"})
    names = [trace.name for trace in curves([long, again], y="accuracy").data if trace.name]
    assert names == ["SynchronousSGD (mean of 2)"]
    figure = curves([long, again, short, live], y="accuracy", x="steps")
    names = [trace.name for trace in figure.data if trace.name]
    assert len(names) == 3
    assert sum("mean of 2" in name for name in names) == 1
    assert any("running" in name for name in names)
    mean = next(trace for trace in figure.data if trace.name and "mean of 2" in trace.name)
    assert max(mean.x) == 5, "nobody is cut to the shorter one"
