"""The papers' large networks: one true step of each, photographs from a folder, and the message if they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.distributed.pool import shared_pool
from workbench import problems
from workbench.errors import ConfigError, DataMissing
from workbench.gradients import trainable
from workbench.problems.imagenet import auxiliary_loss
from workbench.problems.loading import fetch
from workbench.problems.models import Standardise

PARAMETERS = {  # as torchvision's documentation has them, to the last one; auxiliary classifiers included
    "imagenet-alexnet": 61_100_840,
    "imagenet-googlenet": 13_004_888,
    "imagenet-resnet18": 11_689_512,
    "imagenet-resnet50": 25_557_032,
    "imagenet-inception-v3": 27_161_264,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_of_the_papers_networks_takes_a_step_in_its_true_shape(name: str) -> None:
    """In a process of its own, for its memory is up to a gigabyte."""
    shared_pool("torch", 1).run(take_a_step, name)


def take_a_step(name: str) -> None:
    problem = problems.get(name, synthetic=True, samples=4)
    assert problem.name == f"{name}-synthetic" and problem.note == "synthetic data: shapes only, accuracy means nothing"
    torch.manual_seed(0)
    model = problem.model()
    weights = [param for _, param in trainable(model)]
    assert sum(param.numel() for param in weights) == PARAMETERS[name]
    batch = fetch(problem.train_data(), [0, 1])
    side = 299 if "inception" in name else 224
    assert batch[0].shape == (2, 3, side, side) and batch[0].dtype == torch.uint8
    before = [param.detach().clone() for param in weights[-2:]]
    optimizer = problem.optimizer(model.parameters())
    loss = problem.batch_loss(model, batch)
    loss.backward()
    assert loss.isfinite() and all(param.grad is not None and param.grad.isfinite().all() for param in weights)
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, weights[-2:], strict=True))
    right, judged = problem.correct(model.eval(), fetch(problem.test_data(), [0]))
    assert judged == 1 and 0 <= int(right) <= 1


def test_auxiliary_losses_count_by_their_weight_and_only_while_training() -> None:
    class Several(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            scores = super().forward(x)
            return (scores, 2 * scores, 3 * scores) if self.training else scores

    model, x, y = Several(4, 3), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    scores = torch.nn.functional.linear(x, model.weight, model.bias)
    main, second, third = (cross_entropy(factor * scores, y) for factor in (1, 2, 3))
    assert torch.allclose(auxiliary_loss(0.3, model, (x, y)), main + 0.3 * (second + third))
    assert torch.allclose(auxiliary_loss(0.3, model.eval(), (x, y)), main)


def write_photographs(
    root: Path, parts: tuple[str, ...] = ("train", "val"), classes: tuple[str, ...] = ("cat", "dog")
) -> None:
    """Two photographs a class and part: 40 x 60, the class's own grey in it."""
    image = pytest.importorskip("PIL.Image")
    for part in parts:
        for number, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(2):
                image.new("L" if index else "RGB", (60, 40), 100 * number if index else (100 * number,) * 3).save(
                    folder / f"{index}.JPEG"
                )


def test_photographs_are_read_from_the_callers_folder(tmp_path: Path) -> None:
    write_photographs(tmp_path)
    problem = problems.imagenet_resnet18(folder=tmp_path)
    assert (problem.name, problem.note) == ("imagenet-resnet18", "")
    for data in (problem.train_data(), problem.test_data()):
        images, labels = fetch(data, [0, 1, 2, 3])
        assert images.shape == (4, 3, 224, 224) and images.dtype == torch.uint8 and labels.tolist() == [0, 0, 1, 1]
        assert images[:2].float().mean() < 10 < 90 < images[2:].float().mean(), "each photograph with its own label"
    model = problem.model()
    assert model.network.fc.out_features == 2, "as many classes as there are folders"
    assert isinstance(model.standardise, Standardise)
    assert problem.batch_loss(model, (images, labels)).isfinite()


def test_training_photographs_are_cut_anew_and_the_cut_follows_the_seed(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_photographs(tmp_path)
    gradient = torch.arange(60, dtype=torch.uint8).mul(4).repeat(40, 1).numpy()
    image.fromarray(gradient, "L").save(tmp_path / "train/cat/0.JPEG")
    image.fromarray(gradient, "L").save(tmp_path / "val/cat/0.JPEG")
    problem = problems.imagenet_alexnet(folder=tmp_path)
    train, test = problem.train_data(), problem.test_data()
    torch.manual_seed(5)
    first, second = train[0][0], train[0][0]
    torch.manual_seed(5)
    assert torch.equal(train[0][0], first) and not torch.equal(first, second)
    assert torch.equal(test[0][0], test[0][0])


def test_a_folder_that_is_not_laid_out_so_is_refused_with_the_layout(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"folder=.*train/CLASS/\*.JPEG and val/CLASS.*synthetic=True"):
        problems.imagenet_alexnet()
    with pytest.raises(DataMissing, match=rf"looked in {tmp_path}/nowhere: the folder does not exist.*train/CLASS"):
        problems.imagenet_googlenet(folder=tmp_path / "nowhere")
    write_photographs(tmp_path, ("train",))
    with pytest.raises(DataMissing, match="val is not in it, or empty"):
        problems.imagenet_resnet50(folder=tmp_path)
    (tmp_path / "val").mkdir()
    (tmp_path / "val/ILSVRC2012_val_00000001.JPEG").touch()
    with pytest.raises(DataMissing, match="the files in val are not sorted into folders by class"):
        problems.imagenet_resnet50(folder=tmp_path)
    write_photographs(tmp_path, ("val",), ("cat",))
    with pytest.raises(DataMissing, match="dog is in only one of train and val"):
        problems.imagenet_resnet50(folder=tmp_path)
    with pytest.raises(ConfigError, match="give one of the two"):
        problems.imagenet_alexnet(folder=tmp_path, synthetic=True)


def test_a_photograph_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_photographs(tmp_path)
    (tmp_path / "train/dog/1.JPEG").write_bytes(b"no photograph")
    data = problems.imagenet_inception_v3(folder=tmp_path).train_data()
    with pytest.raises(DataMissing, match=r"train/dog/1.JPEG cannot be read"):
        data[3]
    for file in (tmp_path / "train/cat").iterdir():
        file.unlink()
    data = problems.imagenet_alexnet(folder=tmp_path)
    problems.imagenet.image_files.cache_clear()
    with pytest.raises(DataMissing, match="cat"):
        data.train_data()
