"""Attacks, one per file. A new attack is a subclass of :class:`dfl_lightning.Attack`."""

from callbacks.attacks.directed_deviation import DirectedDeviation
from callbacks.attacks.dissensus import Dissensus
from callbacks.attacks.gaussian import Gaussian
from callbacks.attacks.ipm import IPM
from callbacks.attacks.label_flip import LabelFlip
from callbacks.attacks.ladder import Ladder
from callbacks.attacks.lie import ALIE, LIE
from callbacks.attacks.mimic import Mimic
from callbacks.attacks.min_max import MinMax, MinSum
from callbacks.attacks.null_space import NullSpace
from callbacks.attacks.scaled_model import ScaledModel
from callbacks.attacks.sign_flip import BitFlip, SignFlip
from callbacks.attacks.sketch_spoofer import SketchSpoofer
from callbacks.attacks.threshold_rider import ThresholdRider

__all__ = [
    "ALIE",
    "IPM",
    "LIE",
    "BitFlip",
    "DirectedDeviation",
    "Dissensus",
    "Gaussian",
    "LabelFlip",
    "Ladder",
    "Mimic",
    "MinMax",
    "MinSum",
    "NullSpace",
    "ScaledModel",
    "SignFlip",
    "SketchSpoofer",
    "ThresholdRider",
]
