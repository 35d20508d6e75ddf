"""Byzantine-robust decentralised federated learning on PyTorch Lightning."""

from dfl_lightning.checkpoint import AtomicCheckpointIO, load_node
from dfl_lightning.data import NodeBatch, NodeData, NodeDataModule, NodeSplit
from dfl_lightning.errors import UserError
from dfl_lightning.module import DFLModule
from dfl_lightning.phases import Aggregator, Attack, RoundCallback
from dfl_lightning.round import Block, Round
from dfl_lightning.topology import ErdosRenyi, FromFile, FullyConnected, KRegular, Ring, Topology

__all__ = [
    "Aggregator",
    "AtomicCheckpointIO",
    "Attack",
    "Block",
    "DFLModule",
    "ErdosRenyi",
    "FromFile",
    "FullyConnected",
    "KRegular",
    "NodeBatch",
    "NodeData",
    "NodeDataModule",
    "NodeSplit",
    "Ring",
    "Round",
    "RoundCallback",
    "Topology",
    "UserError",
    "load_node",
]
