"""The networks of the papers and a small one for digits: ordinary modules that map images to logits."""

from dfl_lightning.networks.celeba import CelebACNN
from dfl_lightning.networks.digits import DigitsCNN
from dfl_lightning.networks.femnist import FemnistCNN

__all__ = ["CelebACNN", "DigitsCNN", "FemnistCNN"]
