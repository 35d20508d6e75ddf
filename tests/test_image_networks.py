"""AlexNet, SqueezeNet and ResNet-18: their sizes, and that they train."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from datamodules import CIFAR10, CIFAR100, ImageNet12
from dfl_lightning import DFLModule, NodeDataModule, Ring
from dfl_lightning.networks import AlexNet, ResNet18, SqueezeNet

# Name, network, parameters, shape of an image, classes.
NETWORKS = [
    ("alexnet", lambda: AlexNet(), 2_472_266, (3, 32, 32), 10),
    ("alexnet, 100 classes", lambda: AlexNet(100), 2_472_266 + 90 * 257, (3, 32, 32), 100),
    ("squeezenet", lambda: SqueezeNet(), 775_204, (3, 32, 32), 100),
    ("squeezenet, large", lambda: SqueezeNet(small_input=False), 786_724, (3, 224, 224), 100),
    ("squeezenet, ten classes", lambda: SqueezeNet(10), 775_204 - 90 * 513, (3, 32, 32), 10),
    ("resnet", lambda: ResNet18(), 11_182_668, (3, 224, 224), 12),
    ("resnet, small", lambda: ResNet18(small_input=True), 11_174_988, (3, 32, 32), 12),
    ("resnet, small, ten classes", lambda: ResNet18(10, small_input=True), 11_174_988 - 2 * 513, (3, 32, 32), 10),
]


@pytest.mark.parametrize(
    ("make", "parameters", "shape", "classes"), [row[1:] for row in NETWORKS], ids=[row[0] for row in NETWORKS]
)
def test_networks_have_their_number_of_parameters_and_of_logits(
    make: Callable, parameters: int, shape: tuple, classes: int
) -> None:
    with torch.device("meta"):
        network = make()
        assert sum(parameter.numel() for parameter in network.parameters()) == parameters
        assert network(torch.rand(2, *shape)).shape == (2, classes)


def test_alexnet_has_the_layers_of_the_paper() -> None:
    with torch.device("meta"):
        sizes, images = [], torch.rand(1, 3, 32, 32)
        for layer in AlexNet().layers:
            images = layer(images)
            if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.Linear):
                sizes.append(tuple(images.shape[1:]))
    assert sizes == [
        (64, 8, 8),
        (64, 4, 4),
        (192, 4, 4),
        (192, 2, 2),
        (384, 2, 2),
        (256, 2, 2),
        (256, 2, 2),
        (256, 1, 1),
        (10,),
    ]


@pytest.mark.parametrize(("cls", "height"), [(SqueezeNet, 32), (ResNet18, 32)])
def test_a_small_input_keeps_its_size_at_first(cls: type, height: int) -> None:
    with torch.device("meta"):
        layers = list(cls(small_input=True).network.children())
        stem = layers[0][:3] if cls is SqueezeNet else nn.Sequential(*layers[:4])
        assert stem(torch.rand(1, 3, height, height)).shape[2:] == (height, height)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (AlexNet, lambda: CIFAR10("nothing", "rendered", rendered_samples=20, min_samples=4)),
        (SqueezeNet, lambda: CIFAR100("nothing", "rendered", rendered_samples=100, max_samples=4)),
        (
            ResNet18,
            lambda: ImageNet12("nothing", "rendered", size=32, rendered_samples=12, partition="iid", min_samples=4),
        ),
    ],
    ids=["alexnet", "squeezenet", "resnet"],
)
def test_a_round_trains_every_node(make: type[nn.Module], data: Callable[[], NodeDataModule], fit: Callable) -> None:
    module = DFLModule(make, Ring(3), lr=0.01)
    fit(module=module, data=data(), max_epochs=1)
    assert module.replicas.rows.isfinite().all()
    assert 0 <= module.history[-1]["ter/mean"] <= 1
    assert len({row.double().sum().item() for row in module.replicas.rows}) == 3  # each learned from its own data


@pytest.mark.parametrize("network", [AlexNet(), ResNet18(10, small_input=True)], ids=["alexnet", "resnet"])
def test_logits_depend_on_no_other_image_of_the_batch(network: nn.Module) -> None:
    torch.manual_seed(0)
    images = torch.rand(4, 3, 32, 32)
    logits = network.eval()(images)
    assert (logits < 0).any()
    torch.testing.assert_close(network(images[2:3]), logits[2:3], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", [lambda: SqueezeNet(10), lambda: ResNet18(10, small_input=True), AlexNet])
def test_a_few_steps_on_one_batch_lower_its_loss(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    network, images, labels = make(), torch.rand(8, 3, 32, 32), torch.arange(8)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(network(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
