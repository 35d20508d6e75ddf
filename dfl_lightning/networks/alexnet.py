"""AlexNet for small images."""

from torch import Tensor, nn


class AlexNet(nn.Module):
    """Five convolutions for images [n, 3, 32, 32]: 2,472,266 parameters for ten classes, as the GAS paper counts.

    The layers of Krizhevsky et al. (2012) but for the last three, of which one is left, as is usual for CIFAR.

    Args:
        num_classes: number of classes.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 3, 32, 32]."""
        return self.layers(images)
