"""The round: what attacks and aggregators are given, and the two verbs that everything is written with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dfl_lightning.functional.distances import LIMIT, squared_distances
from dfl_lightning.seeding import generator

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


class Round:
    """One exchange of models between neighbours, seen from above.

    Rows 0..N-1 are the nodes' own models, as local training left them; rows N..N+F-1 are what attackers forged. Every
    message is one of these rows. Rules and attacks are written with two verbs, :meth:`reduce` and :meth:`map_`, which
    visit the rows in blocks of columns, so that no copy of all rows is ever made.

    Args:
        rows: Tensor [N, D], changed in place by :meth:`map_`.
        neighbours: bool [N, N], receiver by sender, diagonal False.
        byzantine: bool [N].
        index: t, the number of the round, from 0.
        total: T, the number of rounds.
        seed: of everything random in the run.
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
    """

    def __init__(
        self,
        rows: Tensor,
        neighbours: Tensor,
        byzantine: Tensor,
        *,
        index: int = 0,
        total: int = 1,
        seed: int = 0,
        num_parameters: int | None = None,
        variances: Tensor | None = None,
        start: Tensor | None = None,
    ) -> None:
        self.index, self.total, self.seed = index, total, seed
        self.neighbours, self.byzantine = neighbours, byzantine
        self.num_parameters = rows.shape[1] if num_parameters is None else num_parameters
        self._rows, self._start, self._variances = rows, start, variances
        self._own_finite: Tensor | None = None
        self._route_nothing()
        self.accepted: Tensor | None = None
        self.received: dict[str, Tensor] = {}
        self.broken: Tensor | None = None
        self.metrics: dict[str, float] = {}
        self.notes: list[str] = []
        self.aggregator: Any = None

    def close(self) -> None:
        """Ends the round: an attack's closure and the round hold each other, and with them memory, until this."""
        self._route_nothing()
        self._start = None

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self._rows)

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
        route = route.clone().fill_diagonal_(-1)
        self.sent = torch.where(route >= 0, route + n, torch.arange(n))
        self.announced = self.sent if announce is None else announce
        self.num_forged, self._forge, self._finite = int(route.max()) + 1, fn, None

    # The two verbs

    def _blocks(self, forged: bool = True) -> Iterator[Block]:
        for index, low in enumerate(range(0, self.num_parameters, WIDTH)):
            columns = slice(low, min(low + WIDTH, self.num_parameters))
            own = self._rows[:, columns]
            start = None if self._start is None else self._start[:, columns]
            block = Block(own, own[:0], start, columns, index, (self.seed, self.index))
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
        self._finite = self._own_finite = None

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
        """bool [N]: nodes whose own model, buffers included, is finite."""
        if self._own_finite is None:  # forging changes messages, not own rows
            self._own_finite = self.finite[: self.num_nodes].cpu()
        return self._own_finite & self._buffers_sane

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
        both = self.reduce(lambda block: squared_distances(block.rows, self.num_nodes))
        both = both.where(both.isfinite(), torch.inf).cpu()
        return both[:, :-1], both[:, -1]

    def to_messages(self, squared: Tensor) -> Tensor:
        """Distances [N, N] of each receiver's own row to the messages it gets, from squared ones between all rows."""
        return squared[: self.num_nodes].gather(1, self.sent).sqrt()

    # What rules do

    def count(self, kind: str, edges: Tensor, each: int) -> None:
        """Counts messages of ``each`` parameters over ``edges``, bool [N, N], receiver by sender."""
        self.received[kind] = self.received.get(kind, 0) + edges.sum(1) * each

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

        buffers = self._rows[:, self.num_parameters :]
        if buffers.numel():
            keep = self.sane  # asked before the parameters change
            follow = weights.to(device, dtype) @ buffers.masked_fill(~self._buffers_sane.to(device)[:, None], 0)
            follow[poisoned] = torch.nan
            buffers[keep] = follow[keep]
        self.map_(mixed, forged=len(forged) > 0)
        self.__dict__.pop("_buffers_sane", None)
