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
from dfl_lightning.seeding import derive_seed

if TYPE_CHECKING:  # networkx costs half a second, so it is imported where a graph is made
    import networkx

IfDisconnected = Literal["redraw", "refuse", "keep"]
MAX_DRAWS = 1000  # of a random graph, before giving up on a connected one


class Topology(ABC):
    """Base of every topology. A subclass writes :meth:`graph`.

    Args:
        num_nodes: number of nodes.
    """

    def __init__(self, num_nodes: int) -> None:
        if num_nodes < 1:
            raise UserError(f"topology.num_nodes is {num_nodes}, but it must be at least 1.")
        self.num_nodes = num_nodes

    @abstractmethod
    def graph(self, seed: int) -> "networkx.Graph":
        """The graph over the nodes 0 .. N-1, without self-loops, the same for the same seed of the run."""

    def adjacency(self, seed: int) -> Tensor:
        """Who is whose neighbour: bool [N, N], symmetric, with a diagonal of False.

        >>> Ring(4).adjacency(seed=0).int()
        tensor([[0, 1, 0, 1],
                [1, 0, 1, 0],
                [0, 1, 0, 1],
                [1, 0, 1, 0]], dtype=torch.int32)
        """
        adjacency = torch.zeros(self.num_nodes, self.num_nodes, dtype=torch.bool)
        edges = torch.tensor(list(self.graph(seed).edges), dtype=torch.long).view(-1, 2)
        adjacency[edges[:, 0], edges[:, 1]] = True
        return adjacency | adjacency.T


class Ring(Topology):
    """A cycle: node i exchanges models with nodes i - 1 and i + 1.

    Args:
        num_nodes: number of nodes.
    """

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)

    def graph(self, seed: int) -> "networkx.Graph":
        import networkx as nx

        # Of one or two nodes networkx makes a cycle with a self-loop or a double edge.
        return nx.cycle_graph(self.num_nodes) if self.num_nodes > 2 else nx.path_graph(self.num_nodes)


class FullyConnected(Topology):
    """Every node exchanges models with every other node.

    Args:
        num_nodes: number of nodes.
    """

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)

    def graph(self, seed: int) -> "networkx.Graph":
        import networkx as nx

        return nx.complete_graph(self.num_nodes)


class RandomTopology(Topology):
    """Base of the topologies that are drawn. A subclass writes :meth:`draw` and :meth:`advice`."""

    def __init__(self, num_nodes: int, seed: int | None, if_disconnected: IfDisconnected) -> None:
        super().__init__(num_nodes)
        if if_disconnected not in get_args(IfDisconnected):
            allowed = ", ".join(get_args(IfDisconnected))
            raise UserError(f"topology.if_disconnected is {if_disconnected!r}, but it must be one of {allowed}.")
        self.seed, self.if_disconnected = seed, if_disconnected

    @abstractmethod
    def draw(self, seed: int) -> "networkx.Graph":
        """One random graph, connected or not."""

    @abstractmethod
    def advice(self) -> str:
        """For a message, after "is not connected;": how likely a connected graph is and which settings make it so."""

    def graph(self, seed: int) -> "networkx.Graph":
        """The first drawn graph that is connected, or whatever else ``if_disconnected`` says.

        Raises:
            UserError: no connected graph was drawn and ``if_disconnected`` does not say to keep another.
        """
        import networkx as nx

        chosen = seed if self.seed is None else self.seed
        draws = MAX_DRAWS if self.if_disconnected == "redraw" else 1
        for draw in range(draws):
            graph = self.draw(derive_seed(chosen, "topology", draw))
            if self.if_disconnected == "keep" or nx.is_connected(graph):
                return graph
        tried = f"None of {draws} graphs drawn is" if draws > 1 else f"The graph drawn with seed {chosen} is not"
        raise UserError(f"{tried} connected; {self.advice()}.")


class ErdosRenyi(RandomTopology):
    """An Erdos-Renyi graph: each pair of nodes is joined by an edge with probability p, independently.

    Args:
        num_nodes: number of nodes.
        p: probability of each edge.
        seed: draws the graph in place of the run's seed; give it to keep the graph while the run's seed varies.
        if_disconnected: what to do if some nodes cannot reach others: draw again (up to 1,000 times), refuse to run,
            or keep the graph.
    """

    def __init__(
        self, num_nodes: int, p: float, seed: int | None = None, if_disconnected: IfDisconnected = "redraw"
    ) -> None:
        super().__init__(num_nodes, seed, if_disconnected)
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
    """

    def __init__(
        self, num_nodes: int, k: int, seed: int | None = None, if_disconnected: IfDisconnected = "redraw"
    ) -> None:
        super().__init__(num_nodes, seed, if_disconnected)
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


class FromFile(Topology):
    """A graph read from a file: GraphML if its name ends in .graphml, otherwise text with one edge "u v" per line.

    Nodes are numbered 0 .. N-1 in the sorted order of their names, numerically if all names are integers. Self-loops
    are dropped (a node always has its own model) and repeated edges count once. Models travel both ways along an edge,
    so a directed GraphML file is refused. In text, # starts a comment and networkx's attributes {...} are ignored.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._graph = _numbered(_read_graphml(path) if path.lower().endswith(".graphml") else _read_edges(path))
        if not len(self._graph):
            raise UserError(f"topology.path is {path}, but that file names no nodes: give it one edge 'u v' per line.")
        super().__init__(len(self._graph))

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
