import pytest
import torch
from torch import nn

from datamodules import CIFAR10, CIFAR100, ImageNet12
from datamodules.shapes import draw_shapes, shape_names


@pytest.mark.parametrize(("cls", "first"), [(CIFAR10, "striped disc"), (CIFAR100, "striped disc")])
def test_every_class_is_a_texture_on_an_outline_of_its_own(cls: type, first: str) -> None:
    names = shape_names(cls.num_classes)
    assert len(set(names)) == cls.num_classes
    assert names[0] == first
    textures, outlines = zip(*(name.split() for name in names))
    assert len(set(textures)) * len(set(outlines)) == cls.num_classes  # neither alone tells the class
    assert len(set(textures)) > 1


@pytest.mark.parametrize(("num_classes", "size"), [(10, 32), (100, 32), (ImageNet12.num_classes, 16), (12, 64)])
def test_drawings_depend_on_the_seed_alone(num_classes: int, size: int) -> None:
    images, labels = draw_shapes(num_classes, 200, size, 1, "train")
    assert images.shape == (200, 3, size, size)
    assert images.dtype == torch.uint8
    counts = torch.bincount(labels, minlength=num_classes)
    assert counts.max() - counts.min() <= 1
    again, other = draw_shapes(num_classes, 200, size, 1, "train"), draw_shapes(num_classes, 200, size, 1, "test")
    assert torch.equal(again[0], images)
    assert torch.equal(again[1], labels)
    assert not torch.equal(other[0], images)
    assert len({image.numpy().tobytes() for image in torch.cat([images, other[0]])}) == 400


def test_images_use_the_whole_range_and_are_not_mostly_saturated() -> None:
    images = draw_shapes(10, 500, 32, 0)[0].float()
    assert 0.3 < images.mean() / 255 < 0.6
    assert images.std() / 255 > 0.15
    assert (images == 0).float().mean() + (images == 255).float().mean() < 0.15


@pytest.mark.usefixtures("one_thread")
def test_a_convolution_learns_them_better_than_a_linear_layer() -> None:
    train, labels = draw_shapes(10, 1500, 32, 0, "train")
    test, expected = draw_shapes(10, 500, 32, 0, "test")

    def accuracy(network: nn.Module, lr: float, epochs: int) -> float:
        optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9)
        for _ in range(epochs):
            for rows in torch.randperm(len(train)).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(train[rows] / 255), labels[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            return (network(test / 255).argmax(1) == expected).float().mean().item()

    torch.manual_seed(0)
    linear = accuracy(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), 0.01, 6)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions = accuracy(nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)), 0.02, 6)
    assert 0.15 < linear < 0.65
    assert convolutions > linear + 0.15
