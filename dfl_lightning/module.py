"""The LightningModule that holds all nodes: local training, the round, and evaluation per node."""

import inspect
import logging
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from dfl_lightning.checkpoint import (
    AtomicCheckpointIO,
    describe,
    describe_network,
    refuse_other_data,
    refuse_other_network,
    refuse_other_run,
)
from dfl_lightning.checks import check_trainer
from dfl_lightning.data import NodeBatch, NodeLoader
from dfl_lightning.errors import UserError, finite, one_of
from dfl_lightning.metrics import NodeMeasures, over_honest
from dfl_lightning.optimizer import NodeOptimizer
from dfl_lightning.phases import Aggregator, Attack, RoundCallback
from dfl_lightning.replicas import Init, Replicas
from dfl_lightning.round import Round
from dfl_lightning.seeding import derive_seed, generator, global_seed
from dfl_lightning.topology import Topology, honest_components
from dfl_lightning.traffic import received, screening, traffic

log = logging.getLogger(__name__)

SGD_DEFAULTS = {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}


class DFLModule(LightningModule):
    """A network of nodes that train one model each and exchange models after every epoch.

    One epoch of the Trainer is one round: local training of every node, then the phases of the callbacks (attack,
    aggregation) on a :class:`~dfl_lightning.round.Round`, then validation of every node on its own held-out data.

    Args:
        network: builds the network that every node trains: a class, or any function without arguments.
        topology: who hears whom.
        lr: learning rate of SGD.
        momentum: of SGD, per node.
        weight_decay: of SGD.
        clip_norm: a node's gradient is scaled down to this norm in every local step (default: not).
        optimizer: any torch optimizer, in place of SGD; its own arguments then hold the learning rate.
        keep_optimizer: keep each node's optimizer state (momentum ...) from round to round.
        lr_steps: learning rates from given rounds (from 1) on, such as ``{100: 0.01}``.
        init: ``shared``: all replicas start equal; ``independent``: each from its own initialisation.
        allow_other_total: resume although the checkpoint was made for another number of rounds T, on which thresholds
            depend.

    Attributes:
        replicas: the models of all nodes, once the Trainer has configured the module.
        neighbours: bool [N, N], receiver by sender: the graph of the first round, before any node falls silent.
        byzantine: bool [N]; of all clients where a server samples them.
        history: one dictionary of figures per finished round.
        table: per-node figures of the last evaluation: column -> one value per node.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module],
        topology: Topology,
        lr: float = SGD_DEFAULTS["lr"],
        momentum: float = SGD_DEFAULTS["momentum"],
        weight_decay: float = SGD_DEFAULTS["weight_decay"],
        clip_norm: float | None = None,
        optimizer: Callable[[Iterable], Optimizer] | None = None,
        keep_optimizer: bool = False,
        lr_steps: dict[int, float] | None = None,
        init: Init = "shared",
        allow_other_total: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make_network, self.topology = network, topology
        self.lr, self.momentum, self.weight_decay, self.clip_norm = lr, momentum, weight_decay, clip_norm
        self.make_optimizer, self.keep_optimizer = optimizer, keep_optimizer
        self.lr_steps = lr_steps or {}
        self.init, self.allow_other_total = init, allow_other_total
        self._check_settings()
        self.history: list[dict[str, float]] = []
        self.table: dict[str, list[Any]] = {}
        self._record: dict[str, float] = {}
        self._exchanged: dict[str, list[Any]] = {}
        self._start: Tensor | None = None
        self._round_open = False

    def _check_settings(self) -> None:
        one_of("model.init", self.init, Init)
        for name, default in SGD_DEFAULTS.items():
            value = getattr(self, name)
            finite(f"model.{name}", value)
            if not value >= 0 or (name == "lr" and value == 0):
                raise UserError(f"model.{name} is {value}, but it must be {'above' if name == 'lr' else 'at least'} 0.")
            if self.make_optimizer is not None and value != default:
                raise UserError(
                    f"model.{name} is {value}, but model.optimizer replaces SGD and would ignore it; "
                    f"give it to the optimizer instead, as model.optimizer.init_args.{name}."
                )
        for first, rate in self.lr_steps.items():
            if first < 1 or not rate > 0:
                raise UserError(
                    f"model.lr_steps is {self.lr_steps}, but it must give learning rates above 0 from rounds 1 on."
                )
        if self.topology.central and self.keep_optimizer:
            raise UserError(
                "model.keep_optimizer is true, but a server's clients start anew in every round; leave it false."
            )
        if self.topology.central and self.init != "shared":
            raise UserError(f"model.init is {self.init}, but a server sends all clients one model; use shared.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"model.clip_norm is {self.clip_norm}, but it must be above 0, or null for no clipping.")

    # Building the network of nodes

    def configure_callbacks(self) -> list[Any]:
        """The first hook of a run, before any data is read: who is there, and options that a round does not survive."""
        check_trainer(self.trainer)
        seed = global_seed()
        self.neighbours = self.topology.adjacency(seed)
        attack = self._only(Attack)
        clients = self.topology.num_clients
        self.byzantine = attack.choose(clients, seed) if attack else torch.zeros(clients, dtype=torch.bool)
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.history = []
            if self.topology.central and self._only(Aggregator) is None:
                raise UserError("aggregator is null, but a server needs a rule to make one model of many; choose one.")
            for callback in self._round_callbacks:
                callback.check(self.topology, self.byzantine, seed, self.trainer.max_epochs or 1)
        self.trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return []

    def configure_model(self) -> None:
        if hasattr(self, "replicas"):
            return
        nodes = self.topology.num_nodes
        self.replicas = Replicas(self.make_network, nodes, self.init, global_seed())
        self.own_data, self.union_data = NodeMeasures(nodes), NodeMeasures(nodes)
        self._check_outputs()

    @property
    def _callbacks(self) -> list[Any]:
        return self.trainer.callbacks  # type: ignore[attr-defined]

    @property
    def _round_callbacks(self) -> list[RoundCallback]:
        return [callback for callback in self._callbacks if isinstance(callback, RoundCallback)]

    @property
    def clients(self) -> Tensor:
        """Which client each node is in this round, long [N]."""
        return self.topology.sampled(global_seed(), self.current_epoch)

    @property
    def byzantine_here(self) -> Tensor:
        """Which nodes of this round are Byzantine, bool [N]."""
        return self.byzantine[self.clients]

    @property
    def _data(self) -> Any:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def _only(self, role: type[Any]) -> Any:
        return next((callback for callback in self._callbacks if isinstance(callback, role)), None)

    @torch.no_grad()
    def _check_outputs(self) -> None:
        """Tries the network on one sample, so that a mismatch with the data is said in one sentence."""
        data = self._data
        batch = data.on_after_batch_transfer(next(iter(NodeLoader(data.nodes.train, 1))), 0)
        network = self.replicas.load(0).eval()
        name, shape = type(network).__name__, list(batch.images.shape[1:])
        try:
            logits = network(batch.images[:1].to(self.replicas.rows.dtype))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"The network {name} does not take images of shape {shape}: {reason}; choose another model.network."
            ) from error
        outputs = list(logits.shape[1:]) if isinstance(logits, Tensor) else type(logits).__name__
        if outputs != [data.num_classes]:
            raise UserError(
                f"The network {name} gives outputs of shape {outputs}, but the data has {data.num_classes} classes "
                f"and it must give logits of shape [{data.num_classes}]; set its num_classes, or choose another."
            )

    def configure_optimizers(self) -> NodeOptimizer:
        return NodeOptimizer(self._make_stock_optimizer(self.replicas.load(0).parameters()), self.topology.num_nodes)

    def _make_stock_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.make_optimizer is None:
            return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        try:
            stock = self.make_optimizer(parameters)
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"model.optimizer cannot be made: {error}; change its init_args.") from error
        if inspect.signature(type(stock).step).parameters["closure"].default is inspect.Parameter.empty:
            raise UserError(
                f"model.optimizer is {type(stock).__name__}, whose steps evaluate the loss again; use one whose do not."
            )
        return stock

    # Local training

    def on_fit_start(self) -> None:
        data = self._data
        if self.topology.central:
            links = f"{self.topology.num_nodes} of them in a round"
        else:
            links = f"{int(self.neighbours.sum()) // 2} links"
            if len(parts := honest_components(self.neighbours, self.byzantine)) > 1:
                log.warning(
                    "The honest nodes do not form one connected graph, as the papers' analyses assume; its parts are "
                    "%s.",
                    "; ".join(str(part) for part in parts),
                )
        if data.nodes.warning:
            log.warning("%s", data.nodes.warning)
        log.info(
            "%d %s, %d of them Byzantine, %s; %s parameters each; %d to %d training samples, from %s.",
            self.topology.num_clients,
            "clients" if self.topology.central else "nodes",
            int(self.byzantine.sum()),
            links,
            f"{self.replicas.num_parameters:,}",
            min(len(rows) for rows in data.nodes.train.indices),
            max(len(rows) for rows in data.nodes.train.indices),
            data.nodes.source,
        )
        for row in self.history:  # a resumed run tells its whole story
            for logger in self.loggers:
                logger.log_metrics(row, step=int(row["round"]) - 1)

    def on_train_epoch_start(self) -> None:
        self._clock = time.perf_counter()
        self._record = {"round": self.current_epoch + 1}
        self._round_open = True
        if self.topology.central:  # one row, shown as many
            self._start = self.replicas.rows[:1].clone().expand_as(self.replicas.rows)
        elif any(callback.needs_start for callback in self._round_callbacks):
            self._start = self.replicas.rows.clone()
        for first in sorted(self.lr_steps):
            if self.current_epoch + 1 >= first:
                for group in self.optimizers().optimizer.param_groups:  # type: ignore[union-attr]
                    group["lr"] = self.lr_steps[first]

    def training_step(self, batch: NodeBatch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step(lambda: self._local_steps(batch, batch_idx, optimizer.optimizer))

    def _local_steps(self, batch: NodeBatch, step: int, optimizer: NodeOptimizer) -> None:
        with torch.enable_grad():
            for node, images, labels in batch.per_node():
                network = self.replicas.load(node)
                torch.manual_seed(derive_seed(global_seed(), "local step", self.current_epoch, step, node))  # dropout
                logits = self._forward_training(network, images.to(self.replicas.rows.dtype), node)
                cross_entropy(logits, labels).backward()
                if self.clip_norm is not None:
                    nn.utils.clip_grad_norm_(network.parameters(), self.clip_norm)
                optimizer.step_node(node)
                network.zero_grad(set_to_none=True)
                self.replicas.store()

    @staticmethod
    def _forward_training(network: nn.Module, images: Tensor, node: int) -> Tensor:
        try:
            return network(images)
        except ValueError as error:
            if len(images) == 1 and "more than 1 value per channel" in str(error):
                raise UserError(
                    f"Node {node} has a mini-batch of one sample, which BatchNorm cannot train on; choose a "
                    "data.batch_size or data.max_samples that leaves none over."
                ) from error
            raise

    # The round

    def on_train_batch_end(self, outputs: Any, batch: NodeBatch, batch_idx: int) -> None:
        if self.trainer.is_last_batch:
            self._record["time/training"] = self._lap()
            self._exchange()
            self._record["time/aggregation"] = self._lap()
            if not self.keep_optimizer:
                self.optimizers().optimizer.forget()  # type: ignore[union-attr]

    def _lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        return elapsed

    @torch.no_grad()
    def _exchange(self) -> None:
        """Runs the phases of the round over all callbacks and keeps its record."""
        round = Round(
            self.replicas.rows,
            self.topology.at(global_seed(), self.current_epoch),
            self.byzantine_here,
            central=self.topology.central,
            byzantine_share=float(self.byzantine.double().mean()),
            index=self.current_epoch,
            total=self.trainer.max_epochs or 1,
            seed=global_seed(),
            num_parameters=self.replicas.num_parameters,
            layers=[slot.shape.numel() for slot in self.replicas.layout.parameters],
            variances=self.replicas.layout.variances(),
            start=self._start,
        )
        round.aggregator, round.clients = self._only(Aggregator), self.clients

        def phase(name: str) -> None:
            for callback in self._round_callbacks:
                getattr(callback, name)(round)

        round.attack, round.loss = partial(phase, "on_attack"), partial(self._loss, cache(self._mini_batch))
        phase("on_attack")
        mean = self._honest_mean(round) if round.central else None
        phase("on_aggregate")
        if round.central:
            round.share_()
            if mean is not None:  # GAS, Figure 2
                new = self.replicas.rows[0, : round.num_parameters]
                round.metrics["deviation/honest_mean"] = float(torch.linalg.vector_norm(new - mean))
        phase("on_round_end")
        broken = round.broken if round.broken is not None else ~round.sane
        if nodes := (broken & ~round.byzantine).nonzero()[:, 0].tolist():
            round.notes.append(
                f"Honest nodes {nodes} have a model that is not finite; they neither send nor take part."
            )
        self._record |= screening(round) | traffic(round, self.replicas.rows.itemsize) | round.metrics
        self._exchanged = {
            "neighbours": round.neighbours.sum(1).tolist(),
            "byzantine_neighbours": (round.neighbours & round.byzantine).sum(1).tolist(),
            "received_parameters": received(round).tolist(),
        }
        if round.accepted is not None:
            self._exchanged["accepted_honest"] = (round.accepted & ~round.byzantine).sum(1).tolist()
            self._exchanged["accepted_byzantine"] = (round.accepted & round.byzantine).sum(1).tolist()
        for note in round.notes:
            log.warning("Round %d: %s", round.index + 1, note)
        round.close()
        self._start = None
        self._round_open = False

    def _honest_mean(self, round: Round) -> Tensor | None:
        """The mean of the honest models, [d], row by row without a copy of them all; None if there is none."""
        honest = (~round.byzantine & round.sane).nonzero()[:, 0].tolist()
        if not honest:
            return None
        mean = torch.zeros_like(self.replicas.rows[0, : round.num_parameters])
        for node in honest:
            mean.add_(self.replicas.rows[node, : round.num_parameters], alpha=1 / len(honest))
        return mean

    def _mini_batch(self, node: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a mini-batch of a node's training data, another one in every round."""
        data = self._data
        rows = data.nodes.train.indices[int(self.clients[node])]
        chosen = torch.randperm(len(rows), generator=generator(global_seed(), "judge", self.current_epoch, node))
        batch = data.mini_batch(node, rows[chosen[: data.batch_size]]).to(self.device)
        batch = data.on_after_batch_transfer(batch, 0)
        return batch.images.to(self.replicas.rows.dtype), batch.labels

    def _loss(self, mini_batch: Callable[[int], tuple[Tensor, Tensor]], model: Tensor, node: int) -> float:
        """The loss of a model [D] on the mini-batch of a node."""
        images, labels = mini_batch(node)
        return float(cross_entropy(self.replicas.load(node, model).eval()(images).float(), labels))

    # Evaluation

    def on_validation_epoch_start(self) -> None:
        self._clock = time.perf_counter()
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._record = {}  # what is measured outside a run does not change its last round
        self.own_data.reset()
        self.union_data.reset()

    def validation_step(self, batch: NodeBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        for node, images, labels in batch.per_node():
            measures = self.union_data if dataloader_idx else self.own_data
            logits = self.replicas.load(node)(images.to(self.replicas.rows.dtype))
            measures.update(node, logits.float(), labels)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        figures: dict[str, float] = {}
        ter, loss = self.own_data.compute()
        chosen = self.own_data.measured
        if self.topology.central:
            ter, loss = ter[:1].expand_as(ter), loss[:1].expand_as(loss)  # everybody has the server's model
        else:
            chosen = chosen & ~self.byzantine
        figures |= {f"ter/{name}": value for name, value in over_honest(ter, chosen).items()}
        figures |= {f"loss/{name}": value for name, value in over_honest(loss, chosen).items() if name == "mean"}
        self.table = self._describe_nodes() | {"ter": ter.tolist(), "loss": loss.tolist()}
        if self._data.evaluate_union:
            union, _ = self.union_data.compute()
            figures |= {
                f"ter/union_{name}": value
                for name, value in over_honest(union, ~self.byzantine & self.union_data.measured).items()
            }
            self.table["ter_union"] = union.tolist()
        best = [1 - row["ter/mean"] for row in self.history if "ter/mean" in row]
        if "ter/mean" in figures:
            figures["accuracy/best"] = max(*best, 1 - figures["ter/mean"]) if best else 1 - figures["ter/mean"]
        self.log_dict(figures, logger=False)
        self._record |= figures
        self._record["time/evaluation"] = self._lap()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._finish_round()

    def _describe_nodes(self) -> dict[str, list[Any]]:
        """What is known of each node besides its results: column -> one value per node."""
        data, clients = self._data.nodes, self.clients.tolist()
        table: dict[str, list[Any]] = {
            "node": list(range(self.topology.num_nodes)),
            "byzantine": self.byzantine_here.tolist(),
            "train_samples": [len(data.train.indices[client]) for client in clients],
            "test_samples": [len(data.test.indices[client]) for client in clients],
        }
        if self.topology.central:
            table["client"] = clients
        if data.users:
            table["users"] = [" ".join(data.users[client]) for client in clients]
        return table | self._exchanged

    def on_train_epoch_end(self) -> None:
        self._finish_round()

    def _finish_round(self) -> None:
        """One row per round, for the loggers and the checkpoint; once, whether the round was evaluated or not."""
        if self.history and self.history[-1]["round"] == self._record["round"]:
            return
        self.history.append(self._record)
        for logger in self.loggers:
            logger.log_metrics(self._record, step=self.current_epoch)
            logger.save()

    # Checkpoints

    def _identity(self) -> dict[str, Any]:
        """What makes a run this run and no other."""
        optimizer = self._make_stock_optimizer(self.replicas.load(0).parameters())
        aggregator, attack = self._only(Aggregator), self._only(Attack)
        return {
            "total": self.trainer.max_epochs,
            "seed": global_seed(),
            "num_nodes": self.topology.num_nodes,
            "neighbours": self.neighbours,
            "byzantine": self.byzantine,
            "layout": self.replicas.layout.describe(),
            "network": describe_network(self.make_network),
            "topology": describe(self.topology),
            "optimizer": describe(
                optimizer, optimizer.defaults | {"clip_norm": self.clip_norm, "keep_optimizer": self.keep_optimizer}
            ),
            "data": self._data.fingerprint,
            "aggregator": describe(aggregator),
            "attack": describe(attack),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["dfl_lightning"] = self._identity() | {"history": self.history, "inside_round": self._round_open}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved, here = checkpoint["dfl_lightning"], self._identity()
        refuse_other_network(saved, here)
        refuse_other_data(saved, here)
        if self.trainer.state.fn == TrainerFn.FITTING:
            refuse_other_run(saved, here, self.allow_other_total)
            self.history = list(saved["history"])
