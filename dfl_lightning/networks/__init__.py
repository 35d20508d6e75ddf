"""The networks of the papers and a small one for digits: ordinary modules that map images to logits."""

from dfl_lightning.networks.alexnet import AlexNet
from dfl_lightning.networks.celeba import CelebACNN
from dfl_lightning.networks.digits import DigitsCNN
from dfl_lightning.networks.femnist import FemnistCNN
from dfl_lightning.networks.resnet import ResNet18
from dfl_lightning.networks.squeezenet import SqueezeNet

__all__ = ["AlexNet", "CelebACNN", "DigitsCNN", "FemnistCNN", "ResNet18", "SqueezeNet"]
