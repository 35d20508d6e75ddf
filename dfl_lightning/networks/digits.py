"""A small network for the handwritten digits that scikit-learn ships."""

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """Three convolutions for images [n, 1, 8, 8]: 25,866 parameters for ten classes.

    Deep enough that noise in the parameters destroys it, as it does the papers' networks; a linear classifier of these
    digits would hardly notice the attack of the quickstart.

    Args:
        num_classes: number of classes.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 1, 8, 8] with values in [0, 1]."""
        return self.layers(images)
