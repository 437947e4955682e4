"""`Trainer` in one process: refused calls, values that a loop can read, and the settings of an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from workbench.algorithms import DeAR, EagerDiLoCo, LayerwiseSGD, LocalSGD, PipeSGD, StreamingDiLoCo, SynchronousSGD
from workbench.codecs import Linear8
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.runtimes.control.job import JOB_VARIABLE, STOP_NAME
from workbench.runtimes.user_loop.stop_request import stop_requested
from workbench.runtimes.user_loop.trainer import Trainer

X = torch.tensor([[1.0, 10.0], [3.0, 30.0]], dtype=torch.float64)


class Line(nn.Module):
    """loss = mean over x of a x_0 + b x_1: the gradients are the means of the columns, 2 and 20, for any a and b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x[:, 0] + self.b * x[:, 1]).mean()


def sgd(*modules: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([param for module in modules for param in module.parameters()], lr=lr)


# -- which parameters are trained ------------------------------------------------------------------------------


def test_an_optimizer_with_a_criterions_parameters_is_refused() -> None:
    """They would accumulate their gradients, and each rank would train its own."""
    model, criterion = Line(), Line()
    with pytest.raises(
        ConfigError,
        match=r"parameter 2 of group 0 \(shape \(\)\) is not the model's.*nn\.ModuleList\(\[model, criterion\]\)",
    ):
        Trainer(model, sgd(model, criterion), SynchronousSGD())
    named = torch.optim.SGD([*model.named_parameters("model"), *criterion.named_parameters("criterion")], lr=0.1)
    with pytest.raises(ConfigError, match=r"criterion\.a"):
        Trainer(model, named, SynchronousSGD())


def test_a_model_that_holds_its_criterion_trains_both() -> None:
    model, criterion = Line(), Line()
    with Trainer(nn.ModuleList([model, criterion]), sgd(model, criterion), SynchronousSGD()) as trainer:
        for _ in range(2):
            trainer.step(lambda: model(X) + criterion(X))
    assert [float(param.detach()) for param in (*model.parameters(), *criterion.parameters())] == [-4.0, -40.0] * 2


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = Line(), Line()
    with pytest.raises(
        ConfigError, match=r"holds none of the model's parameters.*make the optimizer from this model's parameters"
    ):
        Trainer(model, sgd(other), SynchronousSGD())


def test_frozen_parameters_in_the_optimizer_are_fine_and_some_may_stay_out_of_it() -> None:
    model = Line()
    model.a.requires_grad_(False)
    with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
        trainer.step(lambda: model(X))
    assert (float(model.a), float(model.b.detach())) == (0.0, -20.0)
    model = Line()
    with Trainer(model, torch.optim.SGD([model.b], lr=1.0), SynchronousSGD()) as trainer:
        trainer.step(lambda: model(X))
    assert (float(model.a.detach()), float(model.b.detach())) == (0.0, -20.0)


def unfreeze(model: Line, optimizer: torch.optim.Optimizer) -> None:
    model.a.requires_grad_(True)


def unfreeze_another(model: Line, optimizer: torch.optim.Optimizer) -> None:
    """One that the model did not hold when the trainer was made."""
    model.more = Line()
    optimizer.add_param_group({"params": [*model.more.parameters()]})


def thaw_in_the_optimizer(model: Line, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"][0].requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "a of the model was unfrozen after"),
        (unfreeze_another, r"the optimizer got parameter 0 of group 2 \(more\.a\)"),
        (thaw_in_the_optimizer, "parameter 0 of group 1 .* was unfrozen after"),
    ],
)
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), DeAR(bucket_bytes=0)], ids=str)
def test_what_is_unfrozen_in_the_run_is_named_with_the_fix(
    algorithm: Algorithm, change: Callable[..., None], words: str
) -> None:
    model, later = Line(), nn.Parameter(torch.zeros(3), requires_grad=False)
    model.a.requires_grad_(False)
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [later]})
    trainer = Trainer(model, optimizer, algorithm)
    trainer.step(lambda: model(X))
    change(model, optimizer)
    with pytest.raises(ConfigError, match=f"{words}.*make the Trainer after"):
        trainer.step(lambda: model(X))


def test_a_parameter_frozen_and_thawed_in_the_run_is_as_in_torch() -> None:
    model = Line()
    with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
        for step in range(3):
            model.a.requires_grad_(step != 1)
            trainer.step(lambda: model(X))
    assert (float(model.a.detach()), float(model.b.detach())) == (-4.0, -60.0)


def test_a_parameter_may_enter_the_optimizer_later() -> None:
    model = Line()
    optimizer = torch.optim.SGD([model.b], lr=1.0)
    with Trainer(model, optimizer, SynchronousSGD()) as trainer:
        trainer.step(lambda: model(X))
        optimizer.add_param_group({"params": [model.a]})
        trainer.step(lambda: model(X))
    assert (float(model.a.detach()), float(model.b.detach())) == (-2.0, -40.0)


# -- what is given to it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapped_model_is_refused_with_the_fix(inside: bool) -> None:
    model: Any = DataParallel(Line())
    model = nn.Sequential(model) if inside else model
    with pytest.raises(ConfigError, match=r"DataParallel.*give the Trainer the model inside.*\.module"):
        Trainer(model, sgd(model), SynchronousSGD())


@pytest.mark.parametrize("given", ["a loss", "a number"])
def test_a_loss_in_place_of_a_function_is_refused(given: str) -> None:
    model = Line()
    loss: Any = model(X) if given == "a loss" else 3.0
    with pytest.raises(
        ConfigError, match=r"step\(\) takes a function.*trainer\.step\(lambda: loss_fn\(model\(x\), y\)\)"
    ):
        Trainer(model, sgd(model), SynchronousSGD()).step(loss)


@pytest.mark.parametrize(
    "how", [lambda scaler, loss: scaler.scale(loss), lambda scaler, loss: scaler.scale(loss) / 4 + 0]
)
def test_a_loss_that_a_grad_scaler_has_scaled_is_refused(how: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    model, scaler = Line(), torch.amp.GradScaler("cpu")
    trainer = Trainer(model, sgd(model), SynchronousSGD())
    with pytest.raises(ConfigError, match=r"GradScaler.*precision='fp16'"):
        trainer.step(lambda: how(scaler, model(X).float()))


def test_a_loss_that_is_scaled_by_a_tensor_of_the_users_or_by_a_disabled_scaler_is_taken() -> None:
    model, factor, scaler = Line(), torch.tensor(2.0), torch.amp.GradScaler("cpu", enabled=False)
    held = [factor]
    with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
        for _ in range(4):
            trainer.step(lambda: scaler.scale(model(X)) * held[0])
    assert float(model.a.detach()) == -16.0


def test_words_name_no_options_that_an_algorithm_lacks() -> None:
    for algorithm, has in ((DeAR(), False), (LayerwiseSGD(apply="any"), True)):
        for options in ({"clip_norm": 1.0}, {"precision": "fp16"}):
            model = Line()
            with pytest.raises(ConfigError) as caught:
                Trainer(model, sgd(model), algorithm, **options)
            assert ("apply='all'" in str(caught.value)) == has or "LayerwiseSGD(apply='all')" in str(caught.value), str(
                caught.value
            )
            assert "SynchronousSGD" in str(caught.value)


# -- what an update uses, and what can be read -----------------------------------------------------------------


def weights_with_a_scheduler(algorithm: Algorithm) -> float:
    """b after four steps with learning rates 1, 1/2, 1/4, 1/8: gradients are 20."""
    model = Line()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with Trainer(model, optimizer, algorithm) as trainer:
        for _ in range(4):
            trainer.step(lambda: model(X))
            scheduler.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5**5
    return float(model.b.detach())


@pytest.mark.parametrize(
    "algorithm", [SynchronousSGD(), DeAR(), DeAR(bucket_bytes=0), PipeSGD(width=2), PipeSGD(width=4)], ids=str
)
def test_an_update_uses_the_learning_rate_of_its_gradients_step(algorithm: Algorithm) -> None:
    assert weights_with_a_scheduler(algorithm) == -20 * (1 + 1 / 2 + 1 / 4 + 1 / 8)


def curved(model: nn.Module) -> Callable[[], torch.Tensor]:
    """A loss whose gradient depends on the weights, so that a wrong update shows in all that follow."""
    return lambda: (model(X) - 3.0).square()


@pytest.mark.parametrize(
    "algorithm",
    [
        SynchronousSGD(),
        DeAR(bucket_bytes=0),
        PipeSGD(width=3),
        PipeSGD(width=3, first="duplicate"),
        LocalSGD(every=3),
        StreamingDiLoCo(every=2, fragments=1, delay=1),
        EagerDiLoCo(every=2, fragments=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_evaluating_shows_the_weights_of_the_end_and_changes_nothing(algorithm: Algorithm, make: Any) -> None:
    def train(num_steps: int, look: int | None = None) -> tuple[list[float], list[float]]:
        model, seen = Line(), []
        model.norm = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
        model.norm[0].eval()
        model.double()
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), lr=0.0003, **options)
        with Trainer(model, optimizer, algorithm) as trainer:
            for step in range(num_steps):
                trainer.step(curved(model))
                if step == look:
                    with trainer.evaluating() as shown:
                        assert not any(module.training for module in shown.modules())
                        seen = [float(param.detach()) for param in (model.a, model.b)]
                        with pytest.raises(ConfigError, match=r"leave the evaluating\(\) block first"):
                            trainer.settle()
                    assert (model.training, model.norm[0].training, model.norm[1].training) == (True, False, True)
        return [float(param.detach()) for param in (model.a, model.b)], seen

    at_the_end, _ = train(4)
    undisturbed, _ = train(7)
    looked, seen = train(7, look=3)
    assert seen == at_the_end
    assert looked == undisturbed


def test_micro_batches_are_one_big_batch() -> None:
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def trained(parts: tuple[torch.Tensor, ...], numbers: list[int]) -> list[float]:
        model = Line()
        with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
            loss = trainer.step([lambda part=part: model(part) for part in parts], numbers)
        assert loss is not None
        return [float(loss), *(float(param.detach()) for param in model.parameters())]

    assert trained((x[:2], x[2:3], x[3:]), [2, 1, 4]) == pytest.approx(trained((x,), [7]), rel=1e-14)


def test_samples_may_be_counted_by_numpy_or_a_tensor() -> None:
    for number in (numpy.int64(2), torch.tensor(2), [numpy.int64(2)], torch.tensor([2])):
        model = Line()
        with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
            trainer.step(lambda model=model: model(X), num_samples=number)  # type: ignore[arg-type, misc]
        assert float(model.b.detach()) == -20.0


def test_a_loop_begins_anew_where_the_first_save_was_interrupted(tmp_path: Path) -> None:
    """As the job does that Slurm starts again."""

    def begins_at(*, missing_ok: bool) -> tuple[int, Any]:
        model = Line()
        with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
            begin = trainer.load(tmp_path / "saved", missing_ok=missing_ok)
            trainer.step(lambda: model(X))
            trainer.save(tmp_path / "saved", "mine")
        return begin

    assert begins_at(missing_ok=True) == (0, None)
    record = next((tmp_path / "saved" / "checkpoints").glob("*.json"))
    record.unlink()  # it is written last
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        begins_at(missing_ok=False)
    assert begins_at(missing_ok=True) == (0, None)
    assert begins_at(missing_ok=True) == (1, "mine")


def test_checkpoints_of_another_training_are_neither_removed_nor_preferred(tmp_path: Path) -> None:
    """A loop that begins again in the same folder, without load()."""

    def train(num_steps: int, *, loads: bool = False) -> int:
        model = Line()
        with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
            begin = trainer.load(tmp_path)[0] if loads else 0
            for _ in range(begin, num_steps):
                trainer.step(lambda: model(X))
            trainer.save(tmp_path, keep=1)
        return begin

    train(4)
    with pytest.raises(OSError, match=r"holds checkpoints of another training, up to 4 steps.*call load\(\)"):
        train(2)
    assert [checkpoint.num_steps for checkpoint in complete_checkpoints(tmp_path)] == [4]
    assert train(6, loads=True) == 4
    assert [checkpoint.num_steps for checkpoint in complete_checkpoints(tmp_path)] == [6]
    newest = complete_checkpoints(tmp_path)[0].rank_file(0)
    train(6, loads=True)
    newest.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="no undamaged checkpoint"):
        train(7, loads=True)


def test_uncounted_micro_batches_count_the_same() -> None:
    model = Line()
    with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
        trainer.step([lambda: model(X[:1]), lambda: model(X[1:]), lambda: model(X[1:])])
        assert trainer.step([]) is None
    assert float(model.b.detach()) == pytest.approx(-(10 + 30 + 30) / 3)


@pytest.mark.parametrize(
    ("losses", "numbers", "words"),
    [
        (2, 3, "give a list"),
        (2, [3], "give the samples of each"),
        (1, [0], r"step\(None\)"),
        ("text", None, "got str"),
    ],
)
def test_micro_batches_that_do_not_fit_their_samples_are_refused(losses: Any, numbers: Any, words: str) -> None:
    model = Line()
    with pytest.raises(ConfigError, match=words):
        Trainer(model, sgd(model), SynchronousSGD()).step(
            [lambda: model(X)] * losses if isinstance(losses, int) else losses, numbers
        )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (SynchronousSGD(), {"clip_norm": 5.0}),
        (SynchronousSGD(), {"clip_norm": math.inf}),
        (SynchronousSGD(), {"keep_gradients": True}),
        (LayerwiseSGD(bucket_bytes=0, apply="any"), {"keep_gradients": True}),
        (DeAR(bucket_bytes=0), {"keep_gradients": True}),
        (PipeSGD(width=2), {"keep_gradients": True}),
    ],
    ids=str,
)
def test_the_norm_of_the_mean_gradient_is_read_after_a_step(algorithm: Algorithm, options: dict[str, Any]) -> None:
    model = Line()
    late = isinstance(algorithm, PipeSGD)
    with Trainer(model, sgd(model), algorithm, **options) as trainer:
        assert trainer.grad_norm is None
        for step in range(3):
            trainer.step(lambda factor=1 + step: factor * model(X))
            with trainer.evaluating():  # changes neither
                pass
            expected = math.hypot(2, 20) * (step if late else step + 1)
            assert trainer.grad_norm == (pytest.approx(expected) if expected else None)
            if "keep_gradients" in options and expected:
                assert [float(param.grad) for param in model.parameters()] == [
                    2.0 * (step + 1 - late),
                    20.0 * (step + 1 - late),
                ]


def test_a_norm_that_nobody_measures_is_not_made_up() -> None:
    model = Line()
    with Trainer(model, sgd(model), SynchronousSGD()) as trainer:
        trainer.step(lambda: model(X))
        with pytest.raises(ConfigError, match=r"keep_gradients=True, or clip_norm=math.inf"):
            _ = trainer.grad_norm
    assert model.a.grad is None


# -- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [True, False])
def test_finish_returns_the_run_also_after_the_block(record: bool, runs: Path) -> None:
    model = Line()
    with Trainer(model, sgd(model), SynchronousSGD(), record=record) as trainer:
        for _ in range(3):
            trainer.step(lambda: model(X))
    found = [trainer.finish() for _ in range(2)]
    if record:
        assert [(run.info["status"], len(run.metrics[0])) for run in found if run is not None] == [("finished", 3)] * 2
    else:
        assert found == [None, None]


# -- a compiled model ------------------------------------------------------------------------------------------


def train_compiled(algorithm: Algorithm, how: str) -> torch.Tensor:
    """Parameters after three steps; the forward pass is compiled by a wrapper or in place, before or in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    compiled = torch.compile(model, backend="eager") if "wrapper" in how else model
    if "in place" in how:
        model.compile(backend="eager")
    if "ran before" in how:
        compiled(X)
    given = compiled if "given" in how else model
    with Trainer(given, sgd(model, lr=0.001), algorithm) as trainer:
        for _ in range(3):
            trainer.step(lambda: compiled(X).square().mean())
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


@pytest.mark.filterwarnings("ignore")
def test_dear_trains_a_compiled_model() -> None:
    expected = train_compiled(SynchronousSGD(), "plain")
    for how in ("wrapper", "wrapper, given", "wrapper, ran before", "in place", "in place, ran before"):
        torch._dynamo.reset()
        torch.testing.assert_close(train_compiled(DeAR(bucket_bytes=0), how), expected, rtol=1e-12, atol=1e-14, msg=how)


# -- the end of a job's time --------------------------------------------------------------------------------------


def test_a_loop_asks_whether_its_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Line()
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    with Trainer(model, sgd(model), PipeSGD()) as trainer:
        assert not stop_requested(trainer), "outside of a job"
        monkeypatch.setenv(JOB_VARIABLE, str(tmp_path))
        assert not stop_requested(trainer), "before the job writes its file"
        (tmp_path / STOP_NAME).touch()
        trainer.step(lambda: model(X))
        assert not stop_requested(trainer)
        (tmp_path / STOP_NAME).write_text("1")
        assert stop_requested(trainer)
    with pytest.raises(ConfigError, match="this Trainer is finished"):
        stop_requested(trainer)


# -- the algorithm's settings ----------------------------------------------------------------------------------


def test_the_record_and_the_checkpoint_know_the_algorithms_settings(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codecs too: a training with one is not continued without it unnoticed."""
    exact, small = LayerwiseSGD(), LayerwiseSGD(collective=Ring(codec=Linear8()))
    for algorithm in (exact, small):
        model = Line()
        with Trainer(model, sgd(model), algorithm, record=True) as trainer:
            trainer.step(lambda model=model: model(X))
            trainer.save(tmp_path / type(algorithm.collective).__name__)
            run = trainer.finish()
        assert run is not None
        assert run.info["algorithm"]["settings"]["collective"] == str(algorithm.collective)
    capsys.readouterr()
    for algorithm in (small, exact):
        model = Line()
        with Trainer(model, sgd(model), algorithm) as trainer:
            trainer.load(tmp_path / "Ring")
        said = capsys.readouterr().out
        assert said.count("this checkpoint is of") == (algorithm is exact)
    assert f"is of {small}, and the training continues with {exact}" in said
