"""Who exchanges models with whom: undirected graphs over the nodes 0 .. N-1, all of them made by networkx."""

import math
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args
from xml.etree.ElementTree import ParseError

import torch
from torch import Tensor

from dfl_lightning.errors import UserError
from dfl_lightning.seeding import derive_seed, generator

if TYPE_CHECKING:  # networkx costs half a second, so it is imported where a graph is made
    import networkx

IfDisconnected = Literal["redraw", "refuse", "keep"]
MAX_DRAWS = 1000  # of a random graph, before giving up on a connected one


class Topology(ABC):
    """Base of every topology. A subclass writes :meth:`graph`.

    One whose graph changes during the run sets ``redraw_every``, too, and writes :meth:`graph_at`.

    Args:
        num_nodes: number of nodes.
        silent: probability that a node is silent in a round: it neither sends nor receives.
    """

    central: bool = False  # a server aggregates once for all
    redraw_every: int | None = None  # rounds that a graph lasts; None: all of them
    silent: float = 0.0
    _latest: tuple[tuple[int, int], Tensor] | None = None

    def __init__(self, num_nodes: int, silent: float = 0.0) -> None:
        if num_nodes < 1:
            raise UserError(f"topology.num_nodes is {num_nodes}, but it must be at least 1.")
        if not 0 <= silent < 1:
            raise UserError(f"topology.silent is {silent}, but it is a probability and must be at least 0 and below 1.")
        self.num_nodes, self.silent = num_nodes, silent

    @property
    def varies(self) -> bool:
        """Whether :meth:`at` may differ from round to round."""
        return self.redraw_every is not None or self.silent > 0

    @abstractmethod
    def graph(self, seed: int) -> "networkx.Graph":
        """The graph over the nodes 0 .. N-1, without self-loops, the same for the same seed of the run."""

    def graph_at(self, seed: int, index: int) -> "networkx.Graph":
        """The graph of round ``index``, silent nodes included: in round 0 and by default, :meth:`graph`."""
        return self.graph(seed)

    def graph_number(self, index: int) -> int:
        """How many graphs came before that of round ``index``."""
        return 0 if self.redraw_every is None else index // self.redraw_every

    @property
    def num_clients(self) -> int:
        """How many there are in all; more than ``num_nodes`` where a server samples them."""
        return self.num_nodes

    def sampled(self, seed: int, index: int) -> Tensor:
        """Which client each node is in round ``index``: long [N], ascending."""
        return torch.arange(self.num_nodes)

    def silent_nodes(self, seed: int, index: int) -> Tensor:
        """Who is silent in round ``index``: bool [N], drawn by the run's seed."""
        return torch.rand(self.num_nodes, generator=generator(seed, "silent", index)) < self.silent

    def at(self, seed: int, index: int) -> Tensor:
        """Who is whose neighbour in round ``index``, from 0: bool [N, N], symmetric, with a diagonal of False.

        A function of the seed of the run and of the round alone, so that a resumed run sees the same graphs.
        """
        heard = ~self.silent_nodes(seed, index)
        return self.drawn(seed, index) & heard & heard[:, None]

    def drawn(self, seed: int, index: int) -> Tensor:
        """As :meth:`at`, if nobody were silent; not to be changed."""
        key = seed, self.graph_number(index)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._matrix(self.graph_at(seed, index))
        return self._latest[1]

    def adjacency(self, seed: int) -> Tensor:
        """Who is whose neighbour in round 0 if nobody is silent: bool [N, N], symmetric, with a diagonal of False.

        >>> Ring(4).adjacency(seed=0).int()
        tensor([[0, 1, 0, 1],
                [1, 0, 1, 0],
                [0, 1, 0, 1],
                [1, 0, 1, 0]], dtype=torch.int32)
        """
        return self._matrix(self.graph(seed))

    def _matrix(self, graph: "networkx.Graph") -> Tensor:
        adjacency = torch.zeros(self.num_nodes, self.num_nodes, dtype=torch.bool)
        edges = torch.tensor(list(graph.edges), dtype=torch.long).view(-1, 2)
        adjacency[edges[:, 0], edges[:, 1]] = True
        return adjacency | adjacency.T


class Ring(Topology):
    """A cycle: node i exchanges models with nodes i - 1 and i + 1.

    Args:
        num_nodes: number of nodes.
        silent: probability that a node is silent in a round: it neither sends nor receives.
    """

    def __init__(self, num_nodes: int, silent: float = 0.0) -> None:
        super().__init__(num_nodes, silent)

    def graph(self, seed: int) -> "networkx.Graph":
        import networkx as nx

        # Of one or two nodes networkx makes a cycle with a self-loop or a double edge.
        return nx.cycle_graph(self.num_nodes) if self.num_nodes > 2 else nx.path_graph(self.num_nodes)


class FullyConnected(Topology):
    """Every node exchanges models with every other node.

    Args:
        num_nodes: number of nodes.
        silent: probability that a node is silent in a round: it neither sends nor receives.
    """

    def __init__(self, num_nodes: int, silent: float = 0.0) -> None:
        super().__init__(num_nodes, silent)

    def graph(self, seed: int) -> "networkx.Graph":
        import networkx as nx

        return nx.complete_graph(self.num_nodes)


class Server(Topology):
    """A server that samples clients in every round and sends all of them the same model (federated learning).

    The nodes of a round are the sampled clients. The server applies the aggregator once, to their messages, and the
    result is everybody's next model.

    Args:
        clients: how many clients there are.
        clients_per_round: how many of them take part in a round (default: all).
        ratio: in place of ``clients_per_round``, their share of all clients; a half is rounded up.
        seed: draws the clients in place of the run's seed.
    """

    central = True

    def __init__(
        self,
        clients: int,
        clients_per_round: int | None = None,
        ratio: float | None = None,
        seed: int | None = None,
    ) -> None:
        if clients < 1:
            raise UserError(f"topology.clients is {clients}, but it must be at least 1.")
        if ratio is not None and clients_per_round is not None:
            raise UserError(
                f"topology.clients_per_round is {clients_per_round} and topology.ratio is {ratio}, but one alone "
                "says how many clients take part; leave the other out."
            )
        if ratio is not None:
            if not 0 < ratio <= 1:
                raise UserError(f"topology.ratio is {ratio}, but it is a share of the clients, above 0 and at most 1.")
            count = math.floor(ratio * clients + 0.5 + 1e-9)
        else:
            count = clients if clients_per_round is None else clients_per_round
        if not 1 <= count <= clients:
            raise UserError(
                f"{count} of {clients} clients would take part in a round, but it must be from 1 to all of them; "
                "change topology.clients_per_round or topology.ratio."
            )
        super().__init__(count)
        self.clients, self.clients_per_round, self.ratio, self.seed = clients, clients_per_round, ratio, seed

    @property
    def num_clients(self) -> int:
        return self.clients

    def sampled(self, seed: int, index: int) -> Tensor:
        source = generator(seed if self.seed is None else self.seed, "clients", index)
        return torch.randperm(self.clients, generator=source)[: self.num_nodes].sort().values

    def graph(self, seed: int) -> "networkx.Graph":
        import networkx as nx

        return nx.complete_graph(self.num_nodes)


class RandomTopology(Topology):
    """Base of the topologies that are drawn. A subclass writes :meth:`draw` and :meth:`advice`."""

    def __init__(
        self,
        num_nodes: int,
        seed: int | None,
        if_disconnected: IfDisconnected,
        redraw_every: int | None = None,
        silent: float = 0.0,
    ) -> None:
        super().__init__(num_nodes, silent)
        if if_disconnected not in get_args(IfDisconnected):
            allowed = ", ".join(get_args(IfDisconnected))
            raise UserError(f"topology.if_disconnected is {if_disconnected!r}, but it must be one of {allowed}.")
        if redraw_every is not None and redraw_every < 1:
            raise UserError(
                f"topology.redraw_every is {redraw_every}, but it is a number of rounds and must be at least 1; "
                f"set it to null for one graph in all rounds."
            )
        self.seed, self.if_disconnected, self.redraw_every = seed, if_disconnected, redraw_every

    @abstractmethod
    def draw(self, seed: int) -> "networkx.Graph":
        """One random graph, connected or not."""

    @abstractmethod
    def advice(self) -> str:
        """For a message, after "is not connected;": how likely a connected graph is and which settings make it so."""

    def graph(self, seed: int) -> "networkx.Graph":
        return self.graph_at(seed, 0)

    def graph_at(self, seed: int, index: int) -> "networkx.Graph":
        """The first graph drawn for the round that is connected, or whatever else ``if_disconnected`` says.

        Raises:
            UserError: no connected graph was drawn and ``if_disconnected`` does not say to keep another.
        """
        import networkx as nx

        chosen, number = seed if self.seed is None else self.seed, self.graph_number(index)
        drawn_by = derive_seed(chosen, "redraw", number) if number else chosen
        draws = MAX_DRAWS if self.if_disconnected == "redraw" else 1
        for draw in range(draws):
            graph = self.draw(derive_seed(drawn_by, "topology", draw))
            if self.if_disconnected == "keep" or nx.is_connected(graph):
                return graph
        when = f" for round {index}" if number else ""
        one = f"The graph drawn{when} with seed {chosen} is not"
        tried = f"None of {draws} graphs drawn{when} is" if draws > 1 else one
        raise UserError(f"{tried} connected; {self.advice()}.")


class ErdosRenyi(RandomTopology):
    """An Erdos-Renyi graph: each pair of nodes is joined by an edge with probability p, independently.

    Args:
        num_nodes: number of nodes.
        p: probability of each edge.
        seed: draws the graph in place of the run's seed; give it to keep the graph while the run's seed varies.
        if_disconnected: what to do if some nodes cannot reach others: draw again (up to 1,000 times), refuse to run,
            or keep the graph.
        redraw_every: draw a new graph every so many rounds; null: one graph for the whole run.
        silent: probability that a node is silent in a round: it neither sends nor receives.
    """

    def __init__(
        self,
        num_nodes: int,
        p: float,
        seed: int | None = None,
        if_disconnected: IfDisconnected = "redraw",
        redraw_every: int | None = None,
        silent: float = 0.0,
    ) -> None:
        super().__init__(num_nodes, seed, if_disconnected, redraw_every, silent)
        self.p = p
        if not 0 <= p <= 1:
            raise UserError(f"topology.p is {p}, but it is a probability and must be from 0 to 1.")
        if p == 0 and num_nodes > 1 and if_disconnected != "keep":
            raise UserError(f"topology.p is 0, which joins no nodes at all; {self.advice()}.")

    def draw(self, seed: int) -> "networkx.Graph":
        import networkx as nx

        # The fast generator walks over edges instead of pairs: sparse graphs are the ones that are drawn many times.
        return nx.fast_gnp_random_graph(self.num_nodes, self.p, seed=seed)

    def advice(self) -> str:
        n = self.num_nodes
        chance = chance_connected(n, self.p)
        chance_text = f"{chance:.2g}" if chance > 1e-6 else "less than 1e-06"
        # Sparse graphs fall apart by isolated nodes, of which there are n (1 - p)^(n - 1) on average: here, 0.1.
        enough = math.ceil(100 * (1 - (0.1 / n) ** (1 / max(1, n - 1)))) / 100
        return (
            f"with topology.num_nodes={n} and topology.p={self.p} the chance of a connected graph is {chance_text}, "
            f"and with topology.p={enough} it is {chance_connected(n, enough):.2g}: "
            f"raise topology.p, or set topology.if_disconnected to keep"
        )


def chance_connected(num_nodes: int, p: float) -> float:
    r"""Probability that an Erdos-Renyi graph is connected, exact up to rounding (Gilbert, "Random graphs", 1959).

    .. math:: P_n = 1 - \sum_{m=1}^{n-1} \binom{n-1}{m-1} P_m (1 - p)^{m (n - m)}

    Here m is the size of the component of one node that is singled out.

    >>> round(chance_connected(3, 0.5), 6)  # the triangle and the 3 paths, of 8 graphs
    0.5
    """
    if p == 1:
        return 1.0
    chances = [0.0, 1.0]
    for n in range(2, num_nodes + 1):
        apart = 0.0
        for m in range(1, n):
            log_ways = math.lgamma(n) - math.lgamma(m) - math.lgamma(n - m + 1)  # binomials exceed a float's range
            apart += chances[m] * math.exp(log_ways + m * (n - m) * math.log1p(-p))
        chances.append(min(1.0, max(0.0, 1 - apart)))
    return chances[num_nodes]


class KRegular(RandomTopology):
    """A random graph in which every node has exactly k neighbours.

    Args:
        num_nodes: number of nodes.
        k: number of neighbours of each node; num_nodes * k must be even.
        seed: draws the graph in place of the run's seed; give it to keep the graph while the run's seed varies.
        if_disconnected: what to do if some nodes cannot reach others: draw again (up to 1,000 times), refuse to run,
            or keep the graph; from k = 3 on it hardly ever happens.
        redraw_every: draw a new graph every so many rounds; null: one graph for the whole run.
        silent: probability that a node is silent in a round: it neither sends nor receives.
    """

    def __init__(
        self,
        num_nodes: int,
        k: int,
        seed: int | None = None,
        if_disconnected: IfDisconnected = "redraw",
        redraw_every: int | None = None,
        silent: float = 0.0,
    ) -> None:
        super().__init__(num_nodes, seed, if_disconnected, redraw_every, silent)
        self.k = k
        if not 0 <= k < num_nodes:
            raise UserError(
                f"topology.k is {k}, but a node has from 0 to {num_nodes - 1} neighbours when topology.num_nodes is "
                f"{num_nodes}: choose topology.k in that range."
            )
        if num_nodes * k % 2:
            raise UserError(
                f"topology.num_nodes is {num_nodes} and topology.k is {k}, but their product must be even, since each "
                f"edge has two ends: change one of them by 1."
            )
        if k < 2 and num_nodes > k + 1 and if_disconnected != "keep":
            raise UserError(
                f"topology.k is {k}, with which no graph of {num_nodes} nodes is connected; {self.advice()}."
            )

    def draw(self, seed: int) -> "networkx.Graph":
        import networkx as nx

        others = self.num_nodes - 1
        if self.k <= others / 2:
            return nx.random_regular_graph(self.k, self.num_nodes, seed=seed)
        # networkx pairs up edge ends at random, which does not finish for dense graphs; the edges that are missing
        # from a k-regular graph form a sparse (n - 1 - k)-regular one, uniform if and only if the other is.
        return nx.complement(nx.random_regular_graph(others - self.k, self.num_nodes, seed=seed))

    def advice(self) -> str:
        return "set topology.k to 3 or more (or use Ring for 2 neighbours), or set topology.if_disconnected to keep"


class Mobility(Topology):
    """Nodes that move in the unit square and exchange models with those within reach.

    They start anywhere, uniformly at random; each has its own direction, keeps to it, and is reflected at the borders.

    Args:
        num_nodes: number of nodes.
        radius: distance up to which two nodes hear each other; the square's sides are 1 long.
        speed: distance that a node covers per round.
        seed: draws starts and directions in place of the run's seed; give it to keep them while the run's seed varies.
        if_disconnected: what to do if some nodes cannot reach others in a round: keep the graph, or refuse to go on.
        silent: probability that a node is silent in a round: it neither sends nor receives.
    """

    def __init__(
        self,
        num_nodes: int,
        radius: float,
        speed: float = 0.05,
        seed: int | None = None,
        if_disconnected: IfDisconnected = "keep",
        silent: float = 0.0,
    ) -> None:
        super().__init__(num_nodes, silent)
        if not 0 < radius < math.inf:
            raise UserError(f"topology.radius is {radius}, but it is a distance and must be above 0 and finite.")
        if not 0 <= speed < math.inf:
            raise UserError(f"topology.speed is {speed}, but it is a distance and must be at least 0 and finite.")
        if if_disconnected not in ("keep", "refuse"):
            raise UserError(
                f"topology.if_disconnected is {if_disconnected!r}, but who hears whom follows from where the nodes are "
                f"and cannot be drawn again; set it to keep or refuse."
            )
        self.radius, self.speed, self.seed, self.if_disconnected = radius, speed, seed, if_disconnected
        self.redraw_every = 1 if speed else None

    def positions(self, seed: int, index: int) -> Tensor:
        """Where the nodes are in round ``index``: float64 [N, 2], from 0 to 1."""
        draw = generator(seed if self.seed is None else self.seed, "mobility")
        start = torch.rand(self.num_nodes, 2, dtype=torch.float64, generator=draw)
        angle = 2 * math.pi * torch.rand(self.num_nodes, dtype=torch.float64, generator=draw)
        direction = torch.stack([angle.cos(), angle.sin()], dim=1)
        # A square of mirrors: straight on through its images, of which every second one is turned round.
        straight = (start + self.speed * index * direction).remainder(2)
        return torch.minimum(straight, 2 - straight)

    def graph(self, seed: int) -> "networkx.Graph":
        return self.graph_at(seed, 0)

    def graph_at(self, seed: int, index: int) -> "networkx.Graph":
        """The graph of all pairs of nodes that are within the radius in round ``index``.

        Raises:
            UserError: it is not connected and ``if_disconnected`` says to refuse it.
        """
        import networkx as nx

        positions = dict(enumerate(self.positions(seed, index).tolist()))
        graph = nx.random_geometric_graph(self.num_nodes, self.radius, pos=positions)
        if self.if_disconnected == "refuse" and not nx.is_connected(graph):
            raise UserError(
                f"The graph of round {index} is not connected, with topology.num_nodes={self.num_nodes} and "
                f"topology.radius={self.radius}: raise topology.radius, or set topology.if_disconnected to keep."
            )
        return graph


class FromFile(Topology):
    """A graph read from a file: GraphML if its name ends in .graphml, otherwise text with one edge "u v" per line.

    Nodes are numbered 0 .. N-1 in the sorted order of their names, numerically if all names are integers. Self-loops
    are dropped (a node always has its own model) and repeated edges count once. Models travel both ways along an edge,
    so a directed GraphML file is refused. In text, # starts a comment and networkx's attributes {...} are ignored.

    Args:
        path: the file.
        silent: probability that a node is silent in a round: it neither sends nor receives.
    """

    def __init__(self, path: str, silent: float = 0.0) -> None:
        self.path = path
        self._graph = _numbered(_read_graphml(path) if path.lower().endswith(".graphml") else _read_edges(path))
        if not len(self._graph):
            raise UserError(f"topology.path is {path}, but that file names no nodes: give it one edge 'u v' per line.")
        super().__init__(len(self._graph), silent)

    def graph(self, seed: int) -> "networkx.Graph":
        return self._graph.copy()


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(f"topology.path is {path}, but it cannot be read ({error}): give a GraphML or an edge list file.")


def _read_edges(path: str) -> "networkx.Graph":
    import networkx as nx

    graph = nx.Graph()
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    for number, line in enumerate(lines, start=1):
        names = line.split("#")[0].split("{")[0].split()
        if len(names) == 2:
            graph.add_edge(*names)
        elif names:
            raise UserError(f"Line {number} of {path} is {line!r}, but it must name the two nodes of an edge: 'u v'.")
    return graph


def _read_graphml(path: str) -> "networkx.Graph":
    import networkx as nx

    try:
        graph = nx.read_graphml(path)
    except (OSError, UnicodeDecodeError, ParseError, nx.NetworkXError) as error:
        raise _unreadable(path, error) from error
    if graph.is_directed():
        raise UserError(
            f"{path} holds a directed graph, but models travel both ways along an edge: set edgedefault to undirected."
        )
    return graph


def _numbered(graph: "networkx.Graph") -> "networkx.Graph":
    """A plain copy with nodes 0 .. N-1 in the order of their names, without attributes, self-loops and double edges."""
    import networkx as nx

    integers = all(re.fullmatch(r"-?\d+", name) for name in graph)
    names = sorted(graph, key=int if integers else str)
    numbers = {name: number for number, name in enumerate(names)}
    plain = nx.empty_graph(len(names))
    plain.add_edges_from((numbers[u], numbers[v]) for u, v in graph.edges() if u != v)
    return plain


def honest_components(adjacency: Tensor, byzantine: Tensor) -> list[list[int]]:
    """The groups of honest nodes that reach each other without passing through a Byzantine node.

    More than one group means that honest nodes cannot all agree, whatever the aggregation rule.

    Args:
        adjacency: bool [N, N].
        byzantine: bool [N].

    Returns:
        Ascending node numbers of each group, groups in the order of their first node.

    >>> honest_components(Ring(6).adjacency(seed=0), torch.tensor([True, False, False, True, False, False]))
    [[1, 2], [4, 5]]
    """
    import networkx as nx

    honest = (~byzantine).nonzero().flatten().tolist()
    graph = nx.empty_graph(honest)
    graph.add_edges_from(edge for edge in adjacency.nonzero().tolist() if edge[0] in graph and edge[1] in graph)
    return sorted(sorted(component) for component in nx.connected_components(graph))
