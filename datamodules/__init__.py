"""Where the nodes' data comes from."""

from datamodules.celeba import CelebA
from datamodules.digits import Digits
from datamodules.femnist import FEMNIST

__all__ = ["FEMNIST", "CelebA", "Digits"]
