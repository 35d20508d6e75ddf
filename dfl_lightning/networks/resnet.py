"""ResNet-18, with BatchNorm."""

from torch import Tensor, nn


class ResNet18(nn.Module):
    """torchvision's ResNet-18 (He et al., 2016), untrained.

    For twelve classes it has 11,182,668 parameters, or 11,174,988 with ``small_input``.

    Args:
        num_classes: number of classes.
        small_input: for images of about 32x32: the first convolution is 3x3 with stride 1, and no pooling follows it.
    """

    def __init__(self, num_classes: int = 12, small_input: bool = False) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.network = resnet18(num_classes=num_classes)
        if small_input:
            convolution = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
            self.network.conv1 = convolution
            self.network.maxpool = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 3, H, W]."""
        return self.network(images)
