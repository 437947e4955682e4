"""DeMo: against NumPy with SciPy's cosine transform; its limits, and what its momenta keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.fft import dct, idct
from torch import Tensor, nn

from workbench.algorithms import DeMo, SynchronousSGD
from workbench.algorithms.de_mo import MOMENTUM, DCTTopK, cosines
from workbench.codecs import ErrorFeedback
from workbench.collectives import Once
from workbench.errors import ConfigError
from workbench.gradients import WEIGHT, Gradient, build_layout
from workbench.ops import AllReduce, Apply, Backward, EndStep, Local, PackParameters
from workbench.program import Algorithm, Context
from workbench.runtimes.reference import ReferenceRuntime

LR, STEPS, RANKS = 0.05, 20, 4
SIZES = (4, 5, 2)
PACKED = [9, 10, 4, 5, 6, 7, 8, 0, 1, 2, 3]  # the order of a gradient: the last parameter is first
FLOAT32 = 2e-6  # components are sent as float32, and none here is above 16
TARGETS = 3 * torch.randn(RANKS, STEPS, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    return parameters - TARGETS[rank, step]


def ran(algorithm: Algorithm) -> ReferenceRuntime:
    return ReferenceRuntime(algorithm, RANKS, pull, lr=LR, start=1.0, sizes=SIZES).run(STEPS)


def fast(values: np.ndarray, chunk: int, top_k: int) -> np.ndarray:
    """IDCT of the largest components of each chunk; the last chunk is filled with zeros."""
    padded = np.pad(values, (0, -len(values) % chunk)).reshape(-1, chunk)
    components = dct(padded, norm="ortho")
    for row in components:
        row[np.argsort(-np.abs(row))[top_k:]] = 0
    return idct(components, norm="ortho").ravel()[: len(values)]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_matrix_is_scipys_transform(size: int) -> None:
    assert np.allclose(cosines(size).numpy(), dct(np.eye(size), axis=0, norm="ortho"), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("chunk", "top_k"), [(4, 1), (4, 4), (8, 3), (64, 5), (1, 1)])
def test_a_message_has_the_largest_components_of_each_chunk(chunk: int, top_k: int) -> None:
    codec = DCTTopK(chunk=chunk, top_k=top_k)
    values = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wire = codec.encode(values)
    assert wire.numel() == codec.wire_bytes(30) == 6 * top_k * -(-30 // chunk)
    found = codec.decode(wire, values).numpy()
    assert np.allclose(found, fast(values.numpy(), chunk, top_k), rtol=0, atol=FLOAT32)
    lost = np.square(values.numpy() - found).sum()
    assert lost <= (1 - top_k / chunk) * values.square().sum() + FLOAT32, "the bound of its docstring"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_chunk(bad: float) -> None:
    values = torch.arange(12.0)
    values[5] = bad
    found = DCTTopK(chunk=4, top_k=2).decode(DCTTopK(chunk=4, top_k=2).encode(values), values)
    assert found.isfinite().tolist() == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize(("decay", "chunk", "top_k"), [(0.9, 4, 1), (0.999, 8, 3), (0.0, 4, 2)])
def test_it_is_the_formula_in_numpy(sign: bool, decay: float, chunk: int, top_k: int) -> None:
    found = ran(DeMo(decay=decay, chunk=chunk, top_k=top_k, sign=sign))
    w, momenta = np.ones(11), np.zeros((RANKS, 11))  # momenta in the order of a gradient
    for step in range(STEPS):
        gradients = np.stack([pull(rank, step, torch.from_numpy(w)).numpy() for rank in range(RANKS)])
        momenta = decay * momenta + gradients[:, PACKED]
        sent = np.stack([fast(momentum, chunk, top_k) for momentum in momenta])
        momenta = momenta - sent
        update = sent.mean(0)
        if sign:
            assert np.abs(update).min() > 10 * FLOAT32, "no sign is that of a rounding error"
            update = np.sign(update)
        w[PACKED] -= LR * update
        for rank in found.ranks:
            assert np.allclose(rank.seen[step].numpy(), w, rtol=0, atol=FLOAT32)


def test_all_components_are_synchronous_sgd() -> None:
    """For any decay: a momentum that is sent whole is empty. With the sign, each coordinate moves by lr."""
    expected = ran(SynchronousSGD()).ranks[0]
    for decay in (0.0, 0.9, 1.0):
        found = ran(DeMo(decay=decay, chunk=4, top_k=4, sign=False)).ranks[2]
        for ours, theirs in zip(found.seen, expected.seen, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=FLOAT32)
    signs = ran(DeMo(chunk=4, top_k=4)).ranks[1].seen
    first = torch.sign(torch.stack([pull(rank, 0, torch.ones(11)) for rank in range(RANKS)]).mean(0))
    assert torch.allclose(signs[0], 1 - LR * first, rtol=0, atol=1e-15)


def test_without_decay_it_is_error_feedback() -> None:
    """Found by another path: the residual of `Once`."""
    feedback = SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=DCTTopK(chunk=4, top_k=1))))
    ours, theirs = ran(DeMo(decay=1.0, chunk=4, top_k=1, sign=False)), ran(feedback)
    for one, other in zip(ours.ranks[3].seen, theirs.ranks[3].seen, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=FLOAT32)


def test_what_leaves_the_momenta_is_what_is_applied() -> None:
    """Without decay, all gradients so far are in the parameters or in the momenta."""
    algorithm = DeMo(decay=1.0, chunk=8, top_k=1, sign=False)
    runtime = ReferenceRuntime(
        algorithm, RANKS, lambda rank, step, w: TARGETS[rank, step], lr=LR, start=0.0, sizes=SIZES
    )
    runtime.run(STEPS, stop_after=STEPS - 1)
    kept = torch.stack([rank.memory[MOMENTUM] for rank in runtime.ranks]).mean(0)
    applied = -runtime.ranks[0].parameters / LR
    assert float(kept.abs().max()) > 1, "much is kept"
    assert torch.allclose(applied[PACKED] + kept, TARGETS.mean(0).sum(0)[PACKED], rtol=0, atol=50 * FLOAT32)


@pytest.mark.parametrize(("value", "weight"), [(float("nan"), 1.0), (0.0, 0.0)])
def test_a_step_that_is_left_out_changes_no_momentum(value: float, weight: float) -> None:
    """A gradient that is not finite, and one without samples, on one rank."""
    layout = build_layout([("w", nn.Parameter(torch.zeros(3)))])
    ctx = Context(0, 1, num_steps=2, layout=layout)
    program = DeMo(chunk=2, top_k=1).worker(ctx)
    request = next(program)
    momenta: list[Tensor] = []
    while len(momenta) < 2:
        answer: object = None
        match request:
            case PackParameters():
                answer = Gradient(torch.zeros(layout.numel), layout, 0, 0)
            case Backward(step):
                answer = Gradient(torch.arange(1.0, layout.numel + 1), layout, step, 0)
                answer.tail()[WEIGHT] = 1.0 if step == 0 else weight
                answer.body().copy_(torch.tensor([1.0, 2.0, 3.0]) if step == 0 else torch.full((3,), value))
            case AllReduce(total):
                answer = total
                assert isinstance(total, Gradient)
                total.body().copy_(
                    DCTTopK(chunk=2, top_k=1).decode(DCTTopK(chunk=2, top_k=1).encode(total.body()), total.body())
                )
            case Local(_, _, action):
                answer = action()
            case Apply(gradient):
                assert bool(gradient.body().isfinite().all()) == (value == 0 or len(momenta) == 0)
            case EndStep():
                momenta.append(ctx.memory[MOMENTUM].clone())
        if len(momenta) < 2:
            request = program.send(answer)
    assert torch.equal(momenta[0], momenta[1]) and bool(momenta[0].any())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"decay": 1.1}, "from 0 to 1"),
        ({"decay": True}, "from 0 to 1"),
        ({"chunk": 0}, "1 to 32768"),
        ({"chunk": 32769}, "1 to 32768"),
        ({"top_k": 0}, "1 or more"),
        ({"top_k": 65}, "at most chunk=64"),
        ({"sign": 1}, "True or False"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DeMo(**settings)  # type: ignore[arg-type]
