"""Byzantine-robust decentralised federated learning on PyTorch Lightning."""

from dfl_lightning.checkpoint import AtomicCheckpointIO, load_node
from dfl_lightning.data import NodeBatch, NodeData, NodeDataModule, NodeSplit
from dfl_lightning.declared import DeclaredRule
from dfl_lightning.distance_rule import DistanceRule, View
from dfl_lightning.errors import UserError
from dfl_lightning.module import DFLModule
from dfl_lightning.phases import Aggregator, Attack, ColludingAttack, RoundCallback
from dfl_lightning.round import Block, Round
from dfl_lightning.topology import ErdosRenyi, FromFile, FullyConnected, KRegular, Mobility, Ring, Server, Topology
from dfl_lightning.vector_rule import VectorRule

__all__ = [
    "Aggregator",
    "AtomicCheckpointIO",
    "Attack",
    "Block",
    "ColludingAttack",
    "DFLModule",
    "DeclaredRule",
    "DistanceRule",
    "ErdosRenyi",
    "FromFile",
    "FullyConnected",
    "KRegular",
    "Mobility",
    "NodeBatch",
    "NodeData",
    "NodeDataModule",
    "NodeSplit",
    "Ring",
    "Round",
    "RoundCallback",
    "Server",
    "Topology",
    "UserError",
    "VectorRule",
    "View",
    "load_node",
]
