"""Aggregation rules, one per file. A new rule is a subclass of :class:`dfl_lightning.Aggregator`."""

from callbacks.aggregators.balance import BALANCE
from callbacks.aggregators.bucketing import Bucketing
from callbacks.aggregators.bulyan import Bulyan
from callbacks.aggregators.dfedavg import DFedAvg
from callbacks.aggregators.dnc import DnC
from callbacks.aggregators.gas import GAS
from callbacks.aggregators.krum import Krum, MultiKrum
from callbacks.aggregators.learn import LEARN
from callbacks.aggregators.median import Median, TrimmedMean
from callbacks.aggregators.rfa import RFA
from callbacks.aggregators.scclip import SCCLIP
from callbacks.aggregators.sketchguard import SketchGuard
from callbacks.aggregators.ubar import UBAR
from callbacks.aggregators.wfagg import WFAgg

__all__ = [
    "BALANCE",
    "GAS",
    "LEARN",
    "RFA",
    "SCCLIP",
    "UBAR",
    "Bucketing",
    "Bulyan",
    "DFedAvg",
    "DnC",
    "Krum",
    "Median",
    "MultiKrum",
    "SketchGuard",
    "TrimmedMean",
    "WFAgg",
]
