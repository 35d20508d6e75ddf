"""Attacks, one per file. A new attack is a subclass of :class:`dfl_lightning.Attack`."""

from callbacks.attacks.directed_deviation import DirectedDeviation
from callbacks.attacks.gaussian import Gaussian
from callbacks.attacks.scaled_model import ScaledModel

__all__ = ["DirectedDeviation", "Gaussian", "ScaledModel"]
