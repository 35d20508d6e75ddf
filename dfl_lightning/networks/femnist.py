"""The networks for FEMNIST, in five sizes."""

from typing import Literal, get_args

from torch import Tensor, nn

from dfl_lightning.errors import UserError

Size = Literal["tiny", "small", "standard", "large", "xlarge"]

# Channels of the two convolutions and units of the hidden layer. Table 9 gives only the parameter counts of the sizes;
# these widths, all of them Table 4's scaled by powers of two, are the ones that give exactly those counts.
WIDTHS = {"tiny": (8, 16, 256), "small": (16, 32, 512), "standard": (32, 64, 2048), "large": (64, 128, 4096)}


class FemnistCNN(nn.Module):
    """Convolutions for handwritten characters [n, 1, 28, 28].

    ========  ==========  =====================================================
    size      parameters  source in the SketchGuard paper
    ========  ==========  =====================================================
    tiny         220,318  Table 9
    small        848,382  Table 9
    standard   6,603,710  Table 4, layer by layer (LEAF's network), and Table 9
    large     26,154,814  Table 9
    xlarge    60,271,678  Table 9
    ========  ==========  =====================================================

    Args:
        size: which of the five sizes.
        num_classes: number of classes (digits, capital and small letters: 62).
    """

    def __init__(self, size: Size = "standard", num_classes: int = 62) -> None:
        super().__init__()
        if size not in get_args(Size):
            raise UserError(f"The size of FemnistCNN is {size!r}, but it must be one of {', '.join(get_args(Size))}.")
        self.layers = _three_convolutions(num_classes) if size == "xlarge" else _two_convolutions(size, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 1, 28, 28]."""
        return self.layers(images)


def _two_convolutions(size: str, num_classes: int) -> nn.Sequential:
    first, second, hidden = WIDTHS[size]
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * 7 * 7, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )


def _three_convolutions(num_classes: int) -> nn.Sequential:
    """The paper says only "further increased dimensions"; these layers give exactly its count."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256 * 7 * 7, 4096),
        nn.ReLU(),
        nn.Linear(4096, 2048),
        nn.ReLU(),
        nn.Linear(2048, num_classes),
    )
