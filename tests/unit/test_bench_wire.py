"""Limits of a step that a wire bounds, from numbers computed by hand; rows, seconds to a loss, the figure."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from workbench.bench.operating_point import MOST, batch_on_line, fitted
from workbench.bench.paired import alternate
from workbench.bench.records import facts_of, write_record
from workbench.bench.rows import Row, compare, table_of
from workbench.bench.time_to_loss import TARGET, seconds_to, target_rows
from workbench.bench.wire import Measured, rows_of
from workbench.bench.wire_cases import BITS, CHOSEN, DDP, LAYERWISE, PIPE, encoded
from workbench.bench.wire_chart import chart
from workbench.cli.main import main
from workbench.clusters.emulated.check import PAYLOAD
from workbench.errors import ConfigError

WIRE_S = 1.0
# Of two ranks each sends as many bytes as a gradient has: a second at 1 Gbit/s
GRADIENT_BYTES = round(WIRE_S * 1e9 / 8 * PAYLOAD)
TIMES = {"compute": 0.5, "forward": 0.2, "codec, 16 bit": 0.1, "codec, 8 bit": 0.3, "synchronous": 1.6, PIPE: 1.05} | {
    "layer-wise, 1 MiB": 1.3,
    "layer-wise, 5 MiB": 1.25,
    f"{PIPE}, 16 bit, 1 to a block": 0.79,
    f"{PIPE}, 16 bit, 2 to a block": 0.77,
    f"{PIPE}, 8 bit, 1 to a block": 0.84,
    f"{PIPE}, 8 bit, 2 to a block": 0.85,
    CHOSEN: 1.24,
    "torch DDP, 1 MiB": 1.5,
    "torch DDP, 5 MiB": 1.3,
    "torch DDP, fp16 hook, 1 MiB": 0.9,
    "torch DDP, PowerSGD hook": 0.8,
}


def measured(**more: float) -> Measured:
    return Measured(
        times={name: [seconds] * 3 for name, seconds in (TIMES | more).items()},
        socket_s=0.1,
        gradient_bytes=GRADIENT_BYTES,
        sent_bytes={f"{PIPE}, 16 bit": GRADIENT_BYTES / 2, f"{PIPE}, 8 bit": GRADIENT_BYTES / 4},
    )


def rows(runtime: Any = "torch", ratio: float = 4, **more: float) -> dict[tuple[str, str], Row]:
    return {(row.what, row.over): row for row in rows_of("a case", measured(**more), runtime, 2, ratio)}


def test_limits_are_the_longer_of_wire_and_work() -> None:
    """The wire takes 1 s, compute and sockets 0.6 s; 16 bits 0.5 s, work 0.5 + 0.1 + 0.05; 8 bits 0.25 s, work 0.5 + 0.3 + 0.025."""
    found = rows()
    assert found[PIPE, "its limit"].theirs == pytest.approx(1.0, rel=1e-5)
    assert found[f"{PIPE}, 16 bit", "its limit"].theirs == pytest.approx(0.65, rel=1e-5)
    assert found[f"{PIPE}, 8 bit", "its limit"].theirs == pytest.approx(0.825, rel=1e-5)
    assert found[f"{PIPE}, 8 bit", "the limit without a codec"].theirs == pytest.approx(1.0, rel=1e-5)
    assert found[LAYERWISE, "its limit"].theirs == pytest.approx(0.2 + 1.0, rel=1e-5), "forward hides nothing"
    slow = rows(compute=2.0, forward=0.5)
    assert slow[PIPE, "its limit"].theirs == pytest.approx(2.1)
    assert slow[LAYERWISE, "its limit"].theirs == pytest.approx(2.1)


def test_what_is_asked() -> None:
    found = rows()
    assert found[PIPE, "its limit"].below == 1.05 and rows("mpi")[PIPE, "its limit"].below == 1.10
    assert found[f"{PIPE}, 8 bit", "its limit"].below == 1.10 and found[LAYERWISE, "its limit"].below == 1.15
    assert found[LAYERWISE, DDP].ratio == pytest.approx(1.25 / 1.3), "each at its best bucket size"
    assert found[f"{PIPE}, 8 bit", DDP].below == pytest.approx(1 / 2.5) and found[
        f"{PIPE}, 16 bit", DDP
    ].below == pytest.approx(1 / 1.8)
    assert found[PIPE, DDP].below is None and rows(ratio=1)[PIPE, DDP].below == pytest.approx(1 / 1.2)
    assert rows(ratio=1)[PIPE, "synchronous"].below == pytest.approx(1 / 1.8)
    assert found[f"{PIPE}, 8 bit", "torch DDP, fp16 hook"].ratio == pytest.approx(0.84 / 0.9)
    assert found[f"{PIPE}, 16 bit", DDP].ratio == pytest.approx(0.77 / 1.3), "in as many pieces as is best"


def test_a_batch_is_fitted_to_the_time_that_its_step_should_take() -> None:
    """2 ms and 0.1 ms a sample; a step never has less than a sample."""
    line = {32: 0.002 + 32e-4, 256: 0.002 + 256e-4}
    assert [batch_on_line(line, seconds) for seconds in (0.002 + 100e-4, 0.067, 0.001)] == [100, 650, 1]


@pytest.mark.parametrize("power", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("seconds", [0.012, 0.03, 0.2])
def test_the_batch_is_corrected_where_the_line_bends(power: float, seconds: float) -> None:
    timed: list[int] = []

    def step_s(samples: int) -> float:
        timed.append(samples)
        return 0.01 + 1e-4 * samples**power

    found = fitted(step_s, seconds)
    assert found in timed and len(timed) <= 6, "its time is known"
    assert step_s(found) == pytest.approx(seconds, rel=0.06) or found == MOST


def test_where_every_step_takes_longer_the_batch_has_one_sample() -> None:
    assert fitted(lambda samples: 0.05 + 1e-4 * samples, 0.02) == 1


def test_the_chosen_buckets_are_compared_with_ddp_and_with_the_sweep() -> None:
    found = rows()
    assert found[CHOSEN, DDP].below == 0.97 and found[CHOSEN, DDP].ratio == pytest.approx(1.24 / 1.3)
    assert found[CHOSEN, LAYERWISE].below == 1.03 and found[CHOSEN, LAYERWISE].ratio == pytest.approx(1.24 / 1.25)


def test_codecs_of_the_cases_can_be_used() -> None:
    for codec in BITS.values():
        assert encoded(codec).lossy and encoded(codec).check(4) is None


def test_steps_ahead_of_a_block_are_not_timed() -> None:
    asked: list[str] = []
    times = alternate({"a": lambda: asked.append("a")}, 2, block=3, warm=1, lead=2, slowest=lambda _: 1.0)
    assert len(asked) == 3 * (3 + 2) and times == {"a": [1.0, 1.0]}


def test_what_a_way_leaves_under_way_is_waited_for_behind_its_time() -> None:
    """Or the next way's steps share the wire with it: Pipe-SGD's last sum, of a gradient four times as long, doubled what 16 bits took."""
    asked: list[str] = []
    steps = {name: partial(asked.append, name) for name in "ab"}
    waited = 0.05

    def settle() -> None:
        asked.append("settle")
        time.sleep(waited)

    times = alternate(steps, 2, warm=0, lead=1, meet=lambda: asked.append("meet"), settle=settle)
    assert asked == [
        "meet",
        "a",
        "a",
        "settle",
        "meet",
        "b",
        "b",
        "settle",
        "meet",
        "b",
        "b",
        "settle",
        "meet",
        "a",
        "a",
        "settle",
    ]
    assert max(*times["a"], *times["b"]) < waited


def test_seconds_to_a_loss_are_the_slowest_rank_s_and_of_all_samples() -> None:
    fast, slow = [(1.0, 4.0), (2.0, 2.0), (3.0, 1.0)], [(1.5, 2.0), (2.5, 2.0), (3.5, 1.0)]
    assert seconds_to([fast, slow], target=2.0, window=1) == 2.5
    assert seconds_to([fast, slow], target=1.5, window=2) == 3.5
    assert seconds_to([fast, slow], target=0.5, window=1) == float("inf")


def test_who_never_reaches_the_loss_has_no_row() -> None:
    curve = [(float(step), TARGET / 2) for step in range(1, 7)]
    late = [(2 * end, loss) for end, loss in curve]
    never = [(end, 9.0) for end, _ in curve]
    turn = [{"synchronous": late, f"{PIPE}, 8 bit": curve, PIPE: never, "torch DDP, fp16 hook": late}] * 2
    found = {(row.what, row.over): row for row in target_rows("a case", [turn, turn], 4)}
    assert set(found) == {
        (f"{PIPE}, 8 bit", "synchronous"),
        (f"{PIPE}, 8 bit", "torch DDP, fp16 hook"),
        ("synchronous", "torch DDP, fp16 hook"),
    }
    assert (
        found[f"{PIPE}, 8 bit", "torch DDP, fp16 hook"].ratio == 0.5
        and found[f"{PIPE}, 8 bit", "torch DDP, fp16 hook"].word == "met"
    )


def test_a_target_is_missed_by_a_way_that_misses_the_loss_in_one_turn() -> None:
    curve = [(float(step), TARGET / 2) for step in range(1, 7)]
    peers = {"synchronous": curve, "torch DDP": curve, "torch DDP, fp16 hook": curve}
    turns = [
        [{**peers, f"{PIPE}, 8 bit": [(end, loss) for end, _ in curve]}] * 2 for loss in (TARGET / 2, 9.0, TARGET / 2)
    ]
    (row,) = [row for row in target_rows("a case", turns, 4) if row.what == f"{PIPE}, 8 bit"]
    assert (row.over, row.word, row.ratio, row.rounds) == ("torch DDP, fp16 hook", "missed", math.inf, 3)
    assert Row.from_record(json.loads(json.dumps(row.as_record()))) == row
    assert "missed" in str(table_of([row]))
    assert not [row for row in target_rows("a case", turns, 1) if row.what == f"{PIPE}, 8 bit"]


def test_the_picture_has_a_line_and_a_limit_of_each(tmp_path: Path) -> None:
    cases = [f"communication about {ratio} of compute, 2 hosts, gloo" for ratio in (1, 4)]
    both = [row for case in cases for row in rows_of(case, measured(), "torch", 2, 4)]
    figure = chart(both)
    named = [trace.name for trace in figure.data if trace.name]
    assert named == [
        "synchronous",
        "torch DDP",
        "layer-wise",
        PIPE,
        f"{PIPE}, 16 bit",
        f"{PIPE}, 8 bit",
        "lower limit",
    ]
    dotted = [trace for trace in figure.data if trace.line.dash == "dot" and trace.x[0] is not None]
    assert [trace.legendgroup for trace in dotted] == ["layer-wise", PIPE, f"{PIPE}, 16 bit", f"{PIPE}, 8 bit"]
    assert dotted[1].y[0] == pytest.approx(2.0, rel=1e-4), "the wire over compute"
    with pytest.raises(ConfigError, match="workbench bench wire"):
        chart([compare([1.0], 1.0, case="another", what="a", over="b")])


def test_a_record_is_shown_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench-wire.json"
    write_record(path, facts_of("wire", list(rows_of("a case", measured(), "torch", 2, 4))))
    assert main(["bench", "wire", "--read", str(path)]) == 0
    assert "its limit" in capsys.readouterr().out
    assert main(["bench", "wire", "--read", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "wire"
    assert main(["bench", "step", "--read", str(path)]) == 2
    assert "is a record of wire" in capsys.readouterr().err
    assert main(["bench", "step", "--figure", "x"]) == 2
