"""SqueezeNet, small in parameters."""

from torch import Tensor, nn


class SqueezeNet(nn.Module):
    """torchvision's SqueezeNet 1.0 (Iandola et al., 2016), untrained.

    For a hundred classes it has 786,724 parameters, or 775,204 with ``small_input``. Its logits pass a ReLU before
    they are averaged over the image, so they are never below 0.

    Args:
        num_classes: number of classes.
        small_input: for images of about 32x32: the first convolution is 3x3 with stride 1, and no pooling follows it.
    """

    def __init__(self, num_classes: int = 100, small_input: bool = True) -> None:
        super().__init__()
        from torchvision.models import squeezenet1_0

        self.network = squeezenet1_0(num_classes=num_classes)
        if small_input:
            convolution = nn.Conv2d(3, 96, 3, padding=1)
            nn.init.kaiming_uniform_(convolution.weight)  # as torchvision draws them
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            self.network.features[0] = convolution
            self.network.features[2] = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 3, H, W]."""
        return self.network(images)
