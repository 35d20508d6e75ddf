"""The network for CelebA."""

from torch import Tensor, nn


class CelebACNN(nn.Module):
    """Two convolutions for faces [n, 3, 84, 84]: 2,219,692 parameters for two classes.

    Layers and sizes: Table 5 of the SketchGuard paper.

    Args:
        num_classes: number of classes.
    """

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 30, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(30, 50, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * 21 * 21, 100),
            nn.ReLU(),
            nn.Linear(100, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 3, 84, 84]."""
        return self.layers(images)
