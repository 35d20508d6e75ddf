from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dfl_lightning.errors import UserError
from dfl_lightning.networks import CelebACNN, DigitsCNN, FemnistCNN

# Name, network, parameters, shape of an image, classes.
NETWORKS = [
    ("tiny", lambda: FemnistCNN("tiny"), 220_318, (1, 28, 28), 62),
    ("small", lambda: FemnistCNN("small"), 848_382, (1, 28, 28), 62),
    ("standard", lambda: FemnistCNN(), 6_603_710, (1, 28, 28), 62),
    ("large", lambda: FemnistCNN("large"), 26_154_814, (1, 28, 28), 62),
    ("xlarge", lambda: FemnistCNN("xlarge"), 60_271_678, (1, 28, 28), 62),
    ("ten classes", lambda: FemnistCNN("tiny", num_classes=10), 220_318 - 52 * 257, (1, 28, 28), 10),
    ("celeba", lambda: CelebACNN(), 2_219_692, (3, 84, 84), 2),
    ("digits", lambda: DigitsCNN(), 25_866, (1, 8, 8), 10),
]


def table(*columns: int) -> list[tuple]:
    return [pytest.param(*(row[column] for column in columns), id=row[0]) for row in NETWORKS]


@pytest.mark.parametrize(("make", "parameters"), table(1, 2))
def test_networks_have_exactly_the_published_number_of_parameters(make: Callable, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == parameters


@pytest.mark.parametrize(("make", "shape", "classes"), table(1, 3, 4))
def test_networks_map_images_to_one_logit_per_class(make: Callable, shape: tuple, classes: int) -> None:
    with torch.device("meta"):
        assert make()(torch.rand(5, *shape)).shape == (5, classes)


@pytest.mark.parametrize(
    ("make", "shape", "outputs"),
    [
        (FemnistCNN, (1, 28, 28), [(32, 28, 28), (32, 14, 14), (64, 14, 14), (64, 7, 7), (3136,), (2048,), (62,)]),
        (CelebACNN, (3, 84, 84), [(30, 84, 84), (30, 42, 42), (50, 42, 42), (50, 21, 21), (22050,), (100,), (2,)]),
    ],
    ids=["table 4", "table 5"],
)
def test_layers_have_the_published_output_sizes(make: Callable, shape: tuple, outputs: list[tuple]) -> None:
    with torch.device("meta"):
        sizes, images = [], torch.rand(1, *shape)
        for layer in make().layers:
            images = layer(images)
            if not isinstance(layer, nn.ReLU):
                sizes.append(tuple(images.shape[1:]))
    assert sizes == outputs


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: FemnistCNN("tiny"), (1, 28, 28)), (CelebACNN, (3, 84, 84)), (DigitsCNN, (1, 8, 8))],
    ids=["femnist", "celeba", "digits"],
)
def test_logits_are_unbounded_and_depend_on_no_other_image_of_the_batch(make: Callable, shape: tuple) -> None:
    torch.manual_seed(0)
    network, images = make(), torch.rand(4, *shape)
    logits = network(images)
    assert (logits < 0).any()
    torch.testing.assert_close(network(images[2:3]), logits[2:3])


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(UserError, match=r"'huge'.*tiny, small, standard, large, xlarge"):
        FemnistCNN("huge")  # type: ignore[arg-type]


def error_after(epochs: int, samples: int) -> float:
    """Test error of DigitsCNN trained on so many digits, as a node of the quickstart trains it."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images)[:, None].float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    test, train = order[:360], order[360 : 360 + samples]
    network = DigitsCNN()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in train[torch.randperm(len(train))].split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    wrong: Tensor = network(images[test]).argmax(1) != labels[test]
    return wrong.float().mean().item()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("epochs", "samples", "error"), [(6, 1437, 0.05), (30, 140, 0.12)])
def test_the_digits_network_learns_within_few_epochs(epochs: int, samples: int, error: float) -> None:
    assert error_after(epochs, samples) < error
