"""Adapters in the real libraries, on two ranks of torchrun: what their own DDP trains, with hooks and whole algorithms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.pool import ROOT, ForkServer, our_environment
from workbench.adapters.hooks import register_hook_on
from workbench.errors import ConfigError

PACKAGES = {"accelerate": "accelerate", "huggingface": "transformers", "lightning": "lightning"}
LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(find_spec(package) is None, reason=f"no {package}: pip install {package}"),
    )
    for name, package in PACKAGES.items()
]
RAW_BYTES = 3984.0  # of the sums of one epoch without a codec
Found = Callable[[str], list[dict[str, Any]]]
OFFLINE = {"HF_HUB_OFFLINE": "1"}
# The libraries need seconds of a core: each process of this file has them from the start.
IMPORTS = """
from contextlib import suppress
from workbench.errors import ConfigError
with suppress(ConfigError):  # first: they repair a torchvision whose operators do not load
    import workbench.adapters.huggingface
    from transformers import BertForSequenceClassification, Trainer
with suppress(ConfigError):
    import workbench.adapters.lightning
with suppress(ImportError):
    import accelerate
"""


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """The program of processes that have imported the libraries."""

    def begin(*command: Any, env: dict[str, str], **more: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(*command, env=env | OFFLINE, **more)

    with closing(ForkServer(compiler=True, begin=begin, code=IMPORTS)) as server:
        yield server.python


@pytest.fixture(scope="module")
def found(python: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A function: library -> what each rank found; made at the first call."""

    @cache
    def found(library: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(library)
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        done = subprocess.run(
            [*command, python, "-m", "tests.distributed.adapted", library, str(folder)],
            env=our_environment({"HOME": str(folder), "PATH": "", **OFFLINE}),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return [json.loads((folder / f"{library}-{rank}.json").read_text()) for rank in range(2)]

    return found


def assert_near(found: list[float], expected: list[float], atol: float = 1e-14) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=atol
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_hook_averages_as_the_librarys_own_ddp_and_a_codec_sends_less(library: str, found: Found) -> None:
    for rank in found(library):
        assert_near(rank["hook"][0], rank["plain"][0])
        assert_near(rank["ring"][0], rank.get("plain accumulated", rank["plain"])[0])
        assert (rank["plain"][1], rank["hook"][1], rank["codec"][1]) == (0.0, RAW_BYTES, RAW_BYTES / 4)
        error = torch.tensor(rank["codec"][0]) - torch.tensor(rank["plain"][0])
        assert 1e-6 < float(error.abs().max()) < 1e-2, "16 of 64 bits"
        assert rank["codec"][0] == found(library)[0]["codec"][0], "equal on all ranks"
        if library == "accelerate":
            plain, hook = rank["accumulated"]
            assert_near(hook, plain)
            assert hook != rank["hook"][0]
        if library == "huggingface":  # a model of its own, of float32, with accumulation, trained twice
            assert_near(rank["bert hook"][0], rank["bert plain"][0], atol=1e-6)
            assert rank["bert hook"][1] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", LIBRARIES)
def test_whole_algorithms_train_as_in_a_plain_loop(library: str, found: Found) -> None:
    for rank in found(library):
        for adapted, by_hand in rank["whole"].values():
            assert_near(adapted, by_hand)
        plain = rank["plain"][0]
        if library == "huggingface":  # its `plain` clips, with a falling rate
            assert_near(rank["clipped"], plain)
            plain = rank["whole"]["synchronous"][0]
            assert_near(rank["unclipped"], plain)
        assert_near(rank["whole"]["synchronous"][0], plain)
        assert_near(rank["whole"]["servers"][0], plain)
        assert rank["whole"]["pipe"][0] != plain != rank["whole"]["local"][0]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", [LIBRARIES[2]])
def test_validation_and_checkpoints_of_lightning_have_what_the_end_would_leave(library: str, found: Found) -> None:
    for rank in found(library):
        for seen in rank["validated"].values():
            assert seen["in validation"] == seen["kept"] == seen["one epoch"]
            assert seen["training"], "the model trains in training mode"
        words = {
            case: text.partition("takes the step itself: ")[2]
            for case, text in rank["refused"].items()
            if case not in REFUSED
        }
        assert words == {
            "accumulation": "use accumulate_grad_batches=1 and larger batches, or HookStrategy",
            "clipping": "it clips by norm: use gradient_clip_algorithm='norm', or HookStrategy",
            "manual": "use automatic optimization with one optimizer, or workbench.Trainer in your own loop",
            "dedicated": "Lightning trains on all ranks: use dedicated=False",
        }


LATE = "acts on gradients before the ranks have exchanged them"
REFUSED = {
    "scheduled": "GradientAccumulationScheduler accumulates gradients: use accumulate_grad_batches=1",
    "accumulated by hand": "this batch is without one (gradients are to be accumulated): use accumulate_grad_batches=1",
    "unfrozen": "BackboneFinetuning gives the optimizer more parameters during training",
    "averaged": "StochasticWeightAveraging reads weights after a step, when updates are in flight",
    "moving average": "EMAWeightAveraging reads weights after a step, when updates are in flight",
    "module backward": f"Overrides.backward {LATE}: change the loss in training_step",
    "module on_after_backward": f"Overrides.on_after_backward {LATE}: read gradients in on_train_batch_end",
    "module on_before_optimizer_step": f"Overrides.on_before_optimizer_step {LATE}: read gradients in",
    "module configure_gradient_clipping": f"Overrides.configure_gradient_clipping {LATE}: clip with",
    "module clip_gradients": f"Overrides.clip_gradients {LATE}: clip with",
    "module optimizer_zero_grad": f"Overrides.optimizer_zero_grad {LATE}: leave it out",
    "callback on_after_backward": f"Sees.on_after_backward {LATE}: read gradients in",
    "callback on_before_optimizer_step": f"Sees.on_before_optimizer_step {LATE}: read gradients in",
    "lambda on_after_backward": f"LambdaCallback.on_after_backward {LATE}: read gradients in",
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", [LIBRARIES[2]])
def test_lightning_with_hooks_clipping_and_averages_trains_as_under_ddp(library: str, found: Found) -> None:
    """The same calls in the same order, and the same weights; what would see no gradient of the update is refused."""
    for rank in found(library):
        for case, (ddp, ours) in rank["as ddp"].items():
            if case == "hooks":
                assert ours[0] == ddp[0]
                ddp, ours = ddp[1], ours[1]
            assert_near(ours, ddp)
            assert case in ("hooks", "bfloat16") or ddp != rank["plain"][0]
        for case, words in REFUSED.items():
            assert words in rank["refused"][case], case
        assert set(rank["refused"]) == set(REFUSED) | {"accumulation", "clipping", "manual", "dedicated"}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", [LIBRARIES[1]])
def test_evaluation_and_checkpoints_of_hugging_face_have_what_the_end_would_leave(library: str, found: Found) -> None:
    for rank in found(library):
        for seen in rank["validated"].values():
            assert seen["in evaluation"] == seen["kept"] == seen["one epoch"]
            assert seen["training"], "the model trains in training mode"
            assert_near(*seen["undisturbed"])
        model, best = rank["best"]
        assert model == best, "no update in flight goes to the best model"
        words = {case: text.partition("takes the step itself: ")[2] for case, text in rank["refused"].items()}
        assert words == {
            "accumulation": "use gradient_accumulation_steps=1 and larger batches, or add_hook",
            "clipping": "use max_grad_norm=0, because only a server of BackupSGD has the mean gradient of an update: set the "
            "algorithm's own clip_norm if it has one",
            "dedicated": "all ranks train here: use dedicated=False",
            "batch size": "auto_find_batch_size begins the training again: use a per_device_train_batch_size that fits",
            "callback": "Sees.on_pre_optimizer_step would come after the update: use compute_loss, on_step_begin or "
            "on_step_end, or add_hook",
            "step": "Steps.training_step would come after the update: use compute_loss, on_step_begin or on_step_end, or "
            "add_hook",
        }


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", [LIBRARIES[1]])
def test_hugging_face_trains_evaluates_and_logs_as_under_ddp(library: str, found: Found) -> None:
    """The same weights, losses, norms and rates at the same calls: evaluations, saves, the best model, a resume."""
    for rank in found(library):
        for case, (ddp, ours) in rank["as ddp"].items():
            assert_near(ours[0], ddp[0])
            assert len(ours[1]) == len(ddp[1]) > 20 or case == "resumed"
            for row, expected in zip(ours[1], ddp[1], strict=True):
                assert row[0] == expected[0], f"{case}: {row}"  # the step, or the call
                assert row[1:] == pytest.approx(expected[1:], rel=1e-9), f"{case}: {row}"


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_examples_of_the_docstrings(library: str, python: str) -> None:
    """In a process of their own, because these libraries set variables of the environment."""
    code = (
        "import doctest, importlib\n"
        f"outcome = doctest.testmod(importlib.import_module('workbench.adapters.{library}'))\n"
        "assert outcome.attempted and not outcome.failed, outcome"
    )
    subprocess.run([python, "-c", code], cwd=ROOT, env=our_environment(dict(os.environ)), check=True, timeout=100)


@pytest.mark.parametrize(("library", "package"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_a_missing_library_names_the_extra(library: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"workbench.adapters.{library}", raising=False)
    with pytest.raises(ConfigError, match=rf"{package} is missing: pip install 'sgd-workbench\[{library}\]'"):
        import_module(f"workbench.adapters.{library}")


def test_a_divided_model_is_refused_with_the_fix() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match=r"divided among ranks .*use torch's DistributedDataParallel"):
            register_hook_on(model, {})
    finally:
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match="DataParallel, which has no ranks"):
        register_hook_on(nn.DataParallel(nn.Linear(2, 1)), {})
    assert register_hook_on(nn.Linear(2, 1), {}) is None


def test_a_model_of_several_ranks_that_is_not_wrapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be averaged without the hook, or not at all."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"is a Linear and not in torch's Dist.*model that Accelerator.prepare returned"
    ):
        register_hook_on(nn.Linear(2, 1), {})


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", [LIBRARIES[1]])
def test_an_error_on_one_rank_ends_the_training_of_hugging_face_on_all(library: str, found: Found) -> None:
    other, own = (rank["failed"] for rank in found(library))
    assert own == "ValueError: this batch cannot be used; the optimizer takes steps again: True"
    assert "rank 1" in other and other.endswith("True"), other
