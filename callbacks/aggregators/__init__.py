"""Aggregation rules, one per file. A new rule is a subclass of :class:`dfl_lightning.Aggregator`."""

from callbacks.aggregators.balance import BALANCE
from callbacks.aggregators.dfedavg import DFedAvg
from callbacks.aggregators.sketchguard import SketchGuard

__all__ = ["BALANCE", "DFedAvg", "SketchGuard"]
