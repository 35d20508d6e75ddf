import time
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest
import torch

from dfl_lightning.errors import UserError
from dfl_lightning.topology import (
    ErdosRenyi,
    FromFile,
    FullyConnected,
    KRegular,
    Ring,
    Topology,
    chance_connected,
    honest_components,
)

TOPOLOGIES = [
    Ring(1),
    Ring(2),
    Ring(7),
    FullyConnected(1),
    FullyConnected(7),
    ErdosRenyi(20, 0.3),
    ErdosRenyi(20, 1.0),
    ErdosRenyi(20, 0.0, if_disconnected="keep"),
    KRegular(20, 2),
    KRegular(20, 16),
    KRegular(1, 0),
    KRegular(2, 1),
]


def described(topology: Topology) -> str:
    return f"{type(topology).__name__}-{topology.num_nodes}"


def degrees(topology: Topology, seed: int = 0) -> list[int]:
    return topology.adjacency(seed).sum(1).tolist()


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=described)
def test_adjacency_is_symmetric_without_self_loops_and_equals_the_graph(topology: Topology) -> None:
    graph, adjacency = topology.graph(seed=3), topology.adjacency(seed=3)
    assert sorted(graph) == list(range(topology.num_nodes))
    assert adjacency.dtype == torch.bool
    assert adjacency.shape == (topology.num_nodes, topology.num_nodes)
    assert torch.equal(adjacency, adjacency.T)
    assert not adjacency.diagonal().any()
    assert torch.equal(adjacency, torch.from_numpy(nx.to_numpy_array(graph, nodelist=range(topology.num_nodes)) > 0))


def test_degrees_are_what_the_names_say() -> None:
    assert degrees(Ring(2)) == [1] * 2
    assert degrees(Ring(7)) == [2] * 7
    assert degrees(FullyConnected(7)) == [6] * 7
    assert degrees(ErdosRenyi(7, 1.0)) == [6] * 7
    assert torch.tensor(degrees(ErdosRenyi(300, 0.2))).float().mean().item() == pytest.approx(0.2 * 299, rel=0.05)


@pytest.mark.parametrize(("k", "num_nodes"), [(16, 20), (32, 35), (96, 100), (154, 155), (299, 300), (150, 300)])
def test_k_regular_graphs_of_any_density_are_made_at_once(k: int, num_nodes: int) -> None:
    start = time.perf_counter()
    assert degrees(KRegular(num_nodes, k)) == [k] * num_nodes
    assert time.perf_counter() - start < 5  # far above what it takes; a dense draw without the complement never ends


@pytest.mark.parametrize("make", [lambda **seed: ErdosRenyi(20, 0.3, **seed), lambda **seed: KRegular(20, 4, **seed)])
def test_random_graphs_follow_the_run_seed_unless_they_have_their_own(make: Callable[..., Topology]) -> None:
    assert torch.equal(make().adjacency(1), make().adjacency(1))
    assert not torch.equal(make().adjacency(1), make().adjacency(2))
    assert torch.equal(make(seed=5).adjacency(1), make(seed=5).adjacency(2))
    assert torch.equal(make(seed=5).adjacency(1), make().adjacency(5))
    assert not torch.equal(make(seed=0).adjacency(1), make().adjacency(1))


def test_a_disconnected_random_graph_is_redrawn_refused_or_kept() -> None:
    seeds = range(20)
    kept = [ErdosRenyi(20, 0.12, if_disconnected="keep").graph(seed) for seed in seeds]
    redrawn = [ErdosRenyi(20, 0.12).graph(seed) for seed in seeds]
    connected = [nx.is_connected(graph) for graph in kept]
    assert any(connected)
    assert not all(connected)
    assert all(map(nx.is_connected, redrawn))
    for seed in seeds:
        refusing = ErdosRenyi(20, 0.12, if_disconnected="refuse")
        if connected[seed]:
            assert nx.utils.graphs_equal(refusing.graph(seed), kept[seed])
            assert nx.utils.graphs_equal(redrawn[seed], kept[seed])
        else:
            with pytest.raises(UserError, match=f"seed {seed} is not connected; .* chance of a connected graph is 0.1"):
                refusing.graph(seed)


def test_two_regular_graphs_are_redrawn_until_they_are_one_cycle() -> None:
    assert any(not nx.is_connected(KRegular(20, 2, if_disconnected="keep").graph(seed)) for seed in range(10))
    assert all(nx.is_connected(KRegular(20, 2).graph(seed)) for seed in range(10))


def test_redrawing_ends_and_the_message_names_a_p_that_works() -> None:
    with pytest.raises(UserError, match=r"None of 1000 .* less than 1e-06, and with topology.p=0.25 it is 0.9"):
        ErdosRenyi(20, 0.01).graph(0)
    assert nx.is_connected(ErdosRenyi(20, 0.25, if_disconnected="refuse").graph(0))


@pytest.mark.parametrize(("num_nodes", "p"), [(1, 0.0), (2, 0.3), (4, 0.3), (5, 0.6), (5, 1.0)])
def test_the_chance_of_a_connected_graph_is_that_of_all_graphs_counted(num_nodes: int, p: float) -> None:
    pairs = [(u, v) for u in range(num_nodes) for v in range(u)]
    total = 0.0
    for chosen in range(2 ** len(pairs)):
        graph = nx.empty_graph(num_nodes)
        graph.add_edges_from(pair for bit, pair in enumerate(pairs) if chosen >> bit & 1)
        edges = graph.number_of_edges()
        total += nx.is_connected(graph) * p**edges * (1 - p) ** (len(pairs) - edges)
    assert chance_connected(num_nodes, p) == pytest.approx(total)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ring(0), "num_nodes is 0"),
        (lambda: FullyConnected(-3), "num_nodes is -3"),
        (lambda: ErdosRenyi(20, 1.5), "p is 1.5"),
        (lambda: ErdosRenyi(20, -0.1), "p is -0.1"),
        (lambda: ErdosRenyi(20, float("nan")), "p is nan"),
        (lambda: ErdosRenyi(20, 0.0), "p is 0.* chance of a connected graph is less than"),
        (lambda: ErdosRenyi(20, 0.5, if_disconnected="maybe"), "'maybe'.*redraw, refuse, keep"),  # type: ignore[arg-type]
        (lambda: KRegular(20, 20), "k is 20.* from 0 to 19"),
        (lambda: KRegular(20, -2), "k is -2"),
        (lambda: KRegular(15, 3), "num_nodes is 15 and topology.k is 3.* even"),
        (lambda: KRegular(20, 1), "k is 1.* 3 or more"),
        (lambda: KRegular(20, 0), "k is 0.* 3 or more"),
        (lambda: FromFile("nowhere.txt"), "nowhere.txt.* cannot be read"),
        (lambda: FromFile("nowhere.graphml"), "nowhere.graphml.* cannot be read"),
    ],
)
def test_impossible_topologies_are_refused_in_the_constructor(make: Callable[[], Topology], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "num_nodes", "edges"),
    [
        ("10 9\n9 100\n", 3, [(0, 1), (0, 2)]),  # numerical order: 9, 10, 100
        ("b a\na c10\nc10 c9\n", 4, [(0, 1), (0, 2), (2, 3)]),  # order of text: a, b, c10, c9
        ("-1 x\nx 10\n9 x\n", 4, [(0, 3), (1, 3), (2, 3)]),  # one name is not an integer: -1, 10, 9, x
        ("# edges\n\n0 1 # the first\n1 0\n1\t2\n2 2\n", 3, [(0, 1), (1, 2)]),
        ("0 1 {'weight': 2}\n", 2, [(0, 1)]),
        ("0 1\n2 2\n", 3, [(0, 1)]),  # node 2 has nobody to talk to, but it is there
    ],
)
def test_an_edge_list_is_numbered_in_the_order_of_its_names(
    text: str, num_nodes: int, edges: list, tmp_path: Path
) -> None:
    topology = FromFile(written(tmp_path / "graph.txt", text))
    assert topology.num_nodes == num_nodes
    assert sorted(map(tuple, map(sorted, topology.graph(seed=0).edges))) == edges
    assert topology.adjacency(seed=0).sum() == 2 * len(edges)


def test_a_graph_written_by_networkx_is_read_back_from_both_formats(tmp_path: Path) -> None:
    graph = nx.random_regular_graph(4, 20, seed=1)
    nx.write_edgelist(graph, tmp_path / "graph.edges")
    nx.write_graphml(graph, tmp_path / "graph.graphml")
    for name in ("graph.edges", "graph.graphml"):
        assert nx.utils.graphs_equal(FromFile(str(tmp_path / name)).graph(seed=0), nx.Graph(graph.edges))


def test_graphml_with_names_double_links_and_a_lonely_node_is_read(tmp_path: Path) -> None:
    graph = nx.MultiGraph([("x", "y"), ("x", "y"), ("y", "y")])
    graph.add_node("lonely")
    nx.write_graphml(graph, tmp_path / "graph.graphml")
    adjacency = FromFile(str(tmp_path / "graph.graphml")).adjacency(seed=0)
    assert adjacency.nonzero().tolist() == [[1, 2], [2, 1]]
    assert len(adjacency) == 3


def test_what_a_caller_does_to_a_graph_from_a_file_stays_with_the_caller(tmp_path: Path) -> None:
    topology = FromFile(written(tmp_path / "graph.txt", "0 1\n1 2\n"))
    topology.graph(seed=0).remove_node(2)
    assert len(topology.graph(seed=0)) == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "0 1\n1 2 3\n", "Line 2 .*'1 2 3'"),
        ("a.txt", "0 1\n5\n", "Line 2 .*'5'"),
        ("a.txt", "# nothing\n", "names no nodes"),
        ("a.graphml", "0 1\n", "cannot be read"),
        ("a.graphml", "<graphml/>", "cannot be read"),
    ],
)
def test_a_malformed_file_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        FromFile(written(tmp_path / name, text))


def test_files_that_are_binary_or_directed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    nx.write_graphml(nx.DiGraph([(0, 1)]), tmp_path / "directed.graphml")
    with pytest.raises(UserError, match="cannot be read"):
        FromFile(str(tmp_path / "binary.txt"))
    with pytest.raises(UserError, match="directed"):
        FromFile(str(tmp_path / "directed.graphml"))


def test_honest_components_are_those_of_the_graph_without_byzantine_nodes() -> None:
    ring = Ring(6).adjacency(seed=0)
    nobody = torch.zeros(6, dtype=torch.bool)
    assert honest_components(ring, nobody) == [[0, 1, 2, 3, 4, 5]]
    assert honest_components(ring, ~nobody) == []
    assert honest_components(ring, torch.tensor([False, True, False, True, False, False])) == [[0, 4, 5], [2]]
