"""The round: what attacks and aggregators are given, and the two verbs that everything is written with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dfl_lightning.functional.distances import LIMIT, squared_distances
from dfl_lightning.seeding import generator

DELIVERED = 8  # forged models that are put together at a time
WIDTH = 16_384  # columns of a block: a block of a hundred rows stays in the cache


@dataclass
class Block:
    """Some columns of all rows. Read it; new columns are returned to the verb that gave it.

    Attributes:
        own: [N, c], the nodes' own rows.
        forged: [F, c], the forged rows.
        start: [N, c], the own rows at the start of the round; None unless a callback declares ``needs_start``.
        columns: which columns of the rows these are.
        index: number of the block on the grid, which depends on the width of the rows only.
    """

    own: Tensor
    forged: Tensor
    start: Tensor | None
    columns: slice
    index: int
    key: tuple[object, ...]

    @property
    def rows(self) -> Tensor:
        """[N + F, c]: own rows, then forged rows."""
        return torch.cat([self.own, self.forged]) if len(self.forged) else self.own

    def generator(self, name: str) -> torch.Generator:
        """A generator that gives the same numbers whenever this block is visited in this round."""
        return generator(*self.key, name, self.index)


def equal_receivers(rows: Tensor, members: Tensor, *keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Receivers that combine the same rows, so that what depends on these alone is computed once for them.

    On a complete graph all honest nodes are one group.

    Args:
        rows: long [N, N], receiver by sender, the row of each message; the own row on the diagonal.
        members: bool [N, N], which of them count; receivers without any are left out.
        keys: further numbers [N] that must be equal within a group.

    Yields:
        Numbers of rows, long [n], in the order of their senders (a row that several of them send counts several
        times), and ascending numbers of receivers, long [m].
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for receiver in members.any(1).nonzero()[:, 0].tolist():
        own_keys = [int(one[receiver]) for one in keys]
        numbers = rows[receiver, members[receiver]].tolist()
        found.setdefault((*own_keys, *numbers), []).append(receiver)
    for group, receivers in found.items():
        yield torch.tensor(group[len(keys) :]), torch.tensor(receivers)


class Round:
    """One exchange of models between neighbours, seen from above.

    Rows 0..N-1 are the nodes' own models, as local training left them; rows N..N+F-1 are what attackers forged. Every
    message is one of these rows. Rules and attacks are written with two verbs, :meth:`reduce` and :meth:`map_`, which
    visit the rows in blocks of columns, so that no copy of all rows is ever made.

    Args:
        rows: Tensor [N, D], changed in place by :meth:`map_`.
        neighbours: bool [N, N], receiver by sender, diagonal False.
        byzantine: bool [N].
        central: a server receives all messages, an attacker's forged one in place of its own model, and sends its new
            model to everybody: all nodes have the same candidates, and :meth:`share_` ends the aggregation.
        byzantine_share: share of all clients that is Byzantine, where a server samples them (default: of the nodes).
        index: t, the number of the round, from 0.
        total: T, the number of rounds.
        seed: of everything random in the run.
        layers: how many parameters each tensor of the model has, in the order of the columns (default: one tensor).
        num_parameters: d; columns from d on are buffers, which follow the models and are not compared (default: D).
        variances: bool [D - d], which buffers must not be negative.
        start: [N, D], the rows at the start of the round, if some callback needs them.

    Attributes:
        sent: long [N, N], the row that is the message j -> i; on the diagonal the own row.
        announced: long [N, N], the row that j claims to i to have (for sketches and digests).
        accepted: bool [N, N], whom the aggregator accepted; None before it ran.
        received: kind of message -> long [N], parameters that each node received.
        broken: bool [N], whose own model was not finite when models were mixed; None before that.
        metrics: further figures of this round to be logged.
        notes: lines about this round for the person who watches.
        aggregator: the rule that will be applied, for attacks that know it.
        clients: long [N], which client each node is in this round.
        attack: forges messages anew; what :meth:`exchange` calls.
        loss: the loss of a model [D] on a mini-batch of a node's training data, for rules that run models.
        exchanges: how often models were exchanged before in this round.
    """

    def __init__(
        self,
        rows: Tensor,
        neighbours: Tensor,
        byzantine: Tensor,
        *,
        central: bool = False,
        byzantine_share: float | None = None,
        index: int = 0,
        total: int = 1,
        seed: int = 0,
        num_parameters: int | None = None,
        layers: list[int] | None = None,
        variances: Tensor | None = None,
        start: Tensor | None = None,
    ) -> None:
        self.index, self.total, self.seed = index, total, seed
        self.neighbours, self.byzantine, self.central = neighbours, byzantine, central
        self.byzantine_share = float(byzantine.double().mean()) if byzantine_share is None else byzantine_share
        self.clients = torch.arange(len(rows))
        self.num_parameters = rows.shape[1] if num_parameters is None else num_parameters
        self.layers = layers or [self.num_parameters]
        self._rows, self._start, self._variances = rows, start, variances
        self._own_finite: Tensor | None = None
        self._route_nothing()
        self.accepted: Tensor | None = None
        self.received: dict[str, Tensor] = {}
        self.broken: Tensor | None = None
        self.metrics: dict[str, float] = {}
        self.notes: list[str] = []
        self.aggregator: Any = None
        self.attack: Callable[[], None] = lambda: None
        self.loss: Callable[[Tensor, int], float] | None = None
        self.exchanges = 0

    def close(self) -> None:
        """Ends the round: an attack's closure and the round hold each other, and with them memory, until this."""
        self._route_nothing()
        self._start = None
        self.attack, self.loss = lambda: None, None

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self._rows)

    @property
    def itemsize(self) -> int:
        """Bytes of one parameter."""
        return self._rows.itemsize

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._rows.device

    def generator(self, name: str) -> torch.Generator:
        """A generator from (seed, round, name)."""
        return generator(self.seed, self.index, name)

    # What is sent

    def _route_nothing(self) -> None:
        self.sent = torch.arange(self.num_nodes).expand(self.num_nodes, self.num_nodes)
        self.announced = self.sent
        self.num_forged = 0
        self._forge: Callable[[Block], Tensor] | None = None
        self._finite: Tensor | None = None
        self._measured: dict[tuple[int, ...], Tensor] = {}
        self._stored: Tensor | None = None

    def forge(self, route: Tensor, fn: Callable[[Block], Tensor], announce: Tensor | None = None) -> None:
        """Replaces messages by forged ones.

        Args:
            route: bool [N], senders of one forged row each, the same for all receivers; or long [N, N], the number of
                the forged row that j sends to i, -1 where j sends its own model.
            fn: makes the columns [F, c] of all forged rows from a block (whose ``forged`` is empty). It is called anew
                whenever a verb needs them: random numbers must come from ``block.generator``.
            announce: long [N, N], the rows that are claimed, if not those that are sent.
        """
        n = self.num_nodes
        if route.dtype == torch.bool:
            route = torch.where(route, route.cumsum(0) - 1, -1).expand(n, n)
        if not self.central:
            route = route.clone().fill_diagonal_(-1)
        self.sent = torch.where(route >= 0, route + n, torch.arange(n))
        self.announced = self.sent if announce is None else announce.where(~torch.eye(n, dtype=torch.bool), self.sent)
        self.num_forged, self._forge = int(route.max()) + 1, fn
        self._own_finite = None
        self._finite, self._measured, self._stored = None, {}, None

    def exchange(self) -> None:
        """Models are exchanged once more in this round: attackers see the current ones and forge anew."""
        self.exchanges += 1
        self._route_nothing()
        self.attack()

    # The two verbs

    def _blocks(self, forged: bool = True) -> Iterator[Block]:
        for index, low in enumerate(range(0, self.num_parameters, WIDTH)):
            columns = slice(low, min(low + WIDTH, self.num_parameters))
            own = self._rows[:, columns]
            start = None if self._start is None else self._start[:, columns]
            key = (self.seed, self.index, self.exchanges) if self.exchanges else (self.seed, self.index)
            block = Block(own, own[:0], start, columns, index, key)
            if forged and self._forge is not None:
                block.forged = self._forge(block)
                if len(block.forged) != self.num_forged:
                    raise ValueError(
                        f"The route sends {self.num_forged} forged rows, but {len(block.forged)} were made."
                    )
            yield block

    def reduce(self, fn: Callable[[Block], Tensor]) -> Tensor:
        """The sum of fn(block) over all blocks, in float64, in the order of the columns.

        The first pass over the rows also finds those that are not finite, while the block is in the cache.
        """
        total: Tensor | float = 0.0
        squares: Tensor | float = 0.0
        probe = self._finite is None
        for block in self._blocks():
            total = total + fn(block).double()
            if probe:
                norms = [torch.linalg.vector_norm(rows, dim=1).double() for rows in (block.own, block.forged)]
                squares = squares + torch.cat(norms).square()
        if probe:
            self._finite = torch.as_tensor(squares) <= LIMIT  # NaN compares False
        return torch.as_tensor(total)

    def map_(self, fn: Callable[[Block], Tensor], forged: bool = True) -> None:
        """Writes fn(block) [N, c], the new columns of every node's row, in place.

        A node whose own row is not finite keeps it: there is nothing sane to mix with.

        Args:
            fn: makes the new columns.
            forged: whether ``fn`` looks at the forged rows.
        """
        self.broken = broken = ~self.sane
        any_broken = bool(broken.any())
        for block in self._blocks(forged):
            new = fn(block)
            if any_broken:
                new[broken] = block.own[broken]
            block.own.copy_(new)
        self._finite, self._own_finite, self._measured, self._stored = None, None, {}, None

    def gather(self, columns: Tensor) -> Tensor:
        """Any columns of all rows, [N + F, len(columns)]. The forged rows are put together first, and kept."""
        own = self._rows.index_select(1, columns)
        if self._forge is None:
            return own
        if self._stored is None:
            self._stored = stored = self._rows.new_empty(self.num_forged, self.num_parameters)
            for block in self._blocks():
                stored[:, block.columns] = block.forged
        return torch.cat([own, self._stored.index_select(1, columns)])

    # What rules need to know

    @property
    def finite(self) -> Tensor:
        """bool [N + F]: which rows hold finite parameters of a size that can be squared."""
        if self._finite is None:
            self.reduce(lambda block: block.own.new_zeros(1))
        assert self._finite is not None
        return self._finite

    @cached_property
    def _buffers_sane(self) -> Tensor:
        buffers = self._rows[:, self.num_parameters :]
        sane = buffers.isfinite().all(1)
        if self._variances is not None:
            sane &= (buffers[:, self._variances.to(buffers.device)] >= 0).all(1)
        return sane.cpu()

    @property
    def sane(self) -> Tensor:
        """bool [N]: nodes whose own model, buffers included, is finite; on a server, whose message is."""
        if self._own_finite is None:
            self._own_finite = self.finite.cpu()[self.sent.diagonal()]
        return self._own_finite & self._buffers_sane

    @property
    def observers(self) -> Tensor:
        """bool [N]: whose view of the round is reported: honest nodes', or the server's, as one of its equal rows."""
        if not self.central:
            return ~self.byzantine
        first = int(self.sane.byte().argmax())
        return torch.arange(self.num_nodes) == first

    @property
    def links(self) -> Tensor:
        """bool [N, N]: over which edges messages move. An honest node whose own model broke sends and takes nothing."""
        return self.neighbours & self.sane[:, None] & (self.sane | self.byzantine)

    @property
    def candidates(self) -> Tensor:
        """bool [N, N]: links whose message is finite. The own model is not among them."""
        return self.links & self.finite.cpu()[self.sent] & self._buffers_sane

    def distances(self) -> tuple[Tensor, Tensor]:
        """Squared distances [N + F, N + F] and norms [N + F] of all rows, float64; infinite where not finite."""
        if () not in self._measured:
            both = self.reduce(lambda block: squared_distances(block.rows, self.num_nodes))
            self._measured[()] = both.where(both.isfinite(), torch.inf).cpu()
        return self._measured[()][:, :-1], self._measured[()][:, -1]

    def sampled_distances(self, sample: int, draw: int = 0) -> Tensor:
        """Squared distances [N + F, N + F] over ``sample`` random columns, the same for whoever asks for a draw."""
        if (sample, draw) not in self._measured:
            source = self.generator(f"columns {self.exchanges} {draw}")
            drawn = torch.randperm(self.num_parameters, generator=source)[:sample].sort().values

            def partial(block: Block) -> Tensor:
                ends = torch.tensor([block.columns.start, block.columns.stop])
                low, high = torch.searchsorted(drawn, ends).tolist()
                some = block.rows[:, drawn[low:high] - block.columns.start]
                return squared_distances(some, self.num_nodes)[:, :-1]

            squared = self.reduce(partial)
            self._measured[sample, draw] = squared.where(squared.isfinite(), torch.inf).cpu()
        return self._measured[sample, draw]

    def to_messages(self, squared: Tensor) -> Tensor:
        """Distances [N, N] of each receiver's own row to the messages it gets, from squared ones between all rows."""
        return squared[: self.num_nodes].gather(1, self.sent).sqrt()

    def deliver(self, pairs: Tensor) -> Iterator[tuple[Tensor, list[int], int]]:
        """Whole models, for rules that must run them.

        Own rows are given as they lie in memory; forged ones are put together a few at a time.

        Args:
            pairs: bool [N, N], receiver by sender; the diagonal is the own model.

        Yields:
            A model [D] with its buffers, the nodes that receive it, and its sender.
        """
        wanted = [(int(self.sent[i, j]), j, i) for i, j in pairs.nonzero().tolist()]
        parcels: dict[tuple[int, int], list[int]] = {}
        for row, sender, receiver in sorted(wanted):
            parcels.setdefault((row, sender), []).append(receiver)
        forged = sorted({row for row, _ in parcels if row >= self.num_nodes})
        for (row, sender), receivers in parcels.items():
            if row < self.num_nodes:
                yield self._rows[row], receivers, sender
        for low in range(0, len(forged), DELIVERED):
            rows = forged[low : low + DELIVERED]
            models = self._rows.new_empty(len(rows), self._rows.shape[1])
            picked = torch.tensor(rows) - self.num_nodes
            for block in self._blocks():
                models[:, block.columns] = block.forged[picked]
            for (row, sender), receivers in parcels.items():
                if row in rows:
                    model = models[rows.index(row)]
                    model[self.num_parameters :] = self._rows[sender, self.num_parameters :]
                    yield model, receivers, sender

    def losses(self, pairs: Tensor) -> Tensor:
        """The loss of each message on a mini-batch of its receiver's training data, float64 [N, N]; NaN elsewhere.

        Args:
            pairs: bool [N, N], receiver by sender; the diagonal is the own model.

        Raises:
            ValueError: nobody gave the round a ``loss``.
        """
        if self.loss is None:
            raise ValueError("This rule runs models on data, so it needs loss, a function of a model [D] and a node.")
        found = torch.full(pairs.shape, torch.nan, dtype=torch.float64)
        for model, receivers, sender in self.deliver(pairs):
            for receiver in receivers:
                found[receiver, sender] = self.loss(model, receiver)
        return found

    # What rules do

    def count(self, kind: str, edges: Tensor, each: int) -> None:
        """Counts messages of ``each`` parameters over ``edges``, bool [N, N], receiver by sender.

        On a server every row is the server, which receives the message on the diagonal as well.
        """
        self.received[kind] = self.received.get(kind, 0) + (edges.sum(1) + self.central) * each

    def share_(self) -> None:
        """The server's new model becomes everybody's; if no message was sane, that of the round's start."""
        assert self.broken is not None
        if (sane := ~self.broken).any():
            self._rows.copy_(self._rows[int(sane.nonzero()[0])].clone())
        elif self._start is not None:
            self._rows.copy_(self._start)

    def mix_(self, weights: Tensor) -> None:
        """Every node's model becomes the weighted sum of its own (diagonal) and its messages; buffers likewise.

        A zero weight never reads its message. A node that gives weight to a message that is not finite becomes NaN;
        nobody else does.

        Args:
            weights: [N, N], receiver by sender.
        """
        n, sane = self.num_nodes, self.finite.cpu()
        onto = torch.zeros(n, n + self.num_forged, dtype=torch.float64).scatter_add_(1, self.sent, weights.double())
        poisoned = (onto[:, ~sane] != 0).any(1) | ((weights != 0) & ~self._buffers_sane).any(1)
        used = (onto != 0).any(0) & sane
        own, forged = used[:n].nonzero()[:, 0], used[n:].nonzero()[:, 0]
        all_own, all_forged, any_poisoned = len(own) == n, len(forged) == self.num_forged, bool(poisoned.any())
        device, dtype = self._rows.device, self._rows.dtype
        to_own, to_forged = onto[:, own].to(device, dtype), onto[:, n + forged].to(device, dtype)

        def mixed(block: Block) -> Tensor:
            new = to_own @ (block.own if all_own else block.own[own])
            if len(forged):
                new.addmm_(to_forged, block.forged if all_forged else block.forged[forged])
            if any_poisoned:
                new[poisoned] = torch.nan
            return new

        self.combine_(mixed, weights, poisoned, forged=len(forged) > 0)

    def combine_(
        self, fn: Callable[[Block], Tensor], weights: Tensor, poisoned: Tensor | None = None, forged: bool = True
    ) -> None:
        """Writes fn(block) [N, c] into every node's parameters; buffers become weighted sums.

        Args:
            fn: makes the new columns.
            weights: [N, N], receiver by sender, for the buffers.
            poisoned: bool [N], nodes whose buffers become NaN.
            forged: whether ``fn`` looks at the forged rows.
        """
        buffers = self._rows[:, self.num_parameters :]
        if buffers.numel():
            keep = self.sane  # asked before the parameters change
            sane = self._buffers_sane.to(buffers.device)
            follow = weights.to(buffers) @ buffers.masked_fill(~sane[:, None], 0)
            if poisoned is not None:
                follow[poisoned] = torch.nan
            buffers[keep] = follow[keep]
        self.map_(fn, forged)
        self.__dict__.pop("_buffers_sane", None)
