"""Where the nodes' data comes from."""

from datamodules.celeba import CelebA
from datamodules.cifar import CIFAR10, CIFAR100
from datamodules.digits import Digits
from datamodules.femnist import FEMNIST
from datamodules.imagenet import ImageNet12

__all__ = ["CIFAR10", "CIFAR100", "FEMNIST", "CelebA", "Digits", "ImageNet12"]
