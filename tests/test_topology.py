import math
import time
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import Tensor

from dfl_lightning.errors import UserError
from dfl_lightning.seeding import derive_seed
from dfl_lightning.topology import (
    ErdosRenyi,
    FromFile,
    FullyConnected,
    KRegular,
    Mobility,
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
    Mobility(1, 0.3),
    Mobility(20, 0.3),
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
        (lambda: ErdosRenyi(20, 0.5, redraw_every=0), "redraw_every is 0.* at least 1.* null"),
        (lambda: KRegular(20, 4, redraw_every=-1), "redraw_every is -1"),
        (lambda: Ring(20, silent=1.0), "silent is 1.0.* at least 0 and below 1"),
        (lambda: FullyConnected(20, silent=-0.1), "silent is -0.1"),
        (lambda: Mobility(20, 0.3, silent=float("nan")), "silent is nan"),
        (lambda: Mobility(20, 0.0), "radius is 0.0.* above 0"),
        (lambda: Mobility(20, float("nan")), "radius is nan"),
        (lambda: Mobility(20, 0.3, speed=-0.1), "speed is -0.1.* at least 0"),
        (lambda: Mobility(20, 0.3, speed=float("inf")), "speed is inf.* finite"),
        (lambda: Mobility(20, 0.3, if_disconnected="redraw"), "'redraw'.* cannot be drawn again; set it to keep or"),
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


class Star(Topology):
    """Somebody's own topology, which knows nothing of rounds."""

    graphs_made = 0

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)

    def graph(self, seed: int) -> nx.Graph:
        self.graphs_made += 1
        return nx.star_graph(self.num_nodes - 1)


def from_file(folder: Path, **settings: float) -> Topology:
    return FromFile(written(folder / "graph.txt", "0 1\n1 2\n2 3\n3 0\n"), **settings)


STATIC = [Ring(7), FullyConnected(7), ErdosRenyi(20, 0.3), KRegular(20, 4), Mobility(20, 0.3, speed=0), Star(7)]
VARYING = {
    "redrawn-ErdosRenyi": lambda **settings: ErdosRenyi(20, 0.3, redraw_every=3, **settings),
    "redrawn-KRegular": lambda **settings: KRegular(20, 4, redraw_every=3, **settings),
    "Mobility": lambda **settings: Mobility(20, 0.3, **settings),
}
SILENT = {
    "Ring": lambda **settings: Ring(20, silent=0.3, **settings),
    "FullyConnected": lambda **settings: FullyConnected(20, silent=0.3, **settings),
    "ErdosRenyi": lambda **settings: ErdosRenyi(20, 0.3, silent=0.3, **settings),
    "KRegular": lambda **settings: KRegular(20, 4, silent=0.3, **settings),
    **{f"silent-{name}": lambda make=make, **settings: make(silent=0.3, **settings) for name, make in VARYING.items()},
}

varying = pytest.mark.parametrize("make", VARYING.values(), ids=VARYING.keys())
silent = pytest.mark.parametrize("make", SILENT.values(), ids=SILENT.keys())
varying_or_silent = pytest.mark.parametrize("make", [*VARYING.values(), *SILENT.values()], ids=[*VARYING, *SILENT])


def rounds(topology: Topology, seed: int = 1, count: int = 12) -> list[Tensor]:
    return [topology.at(seed, index) for index in range(count)]


def equal(graphs: list[Tensor], others: list[Tensor]) -> bool:
    return len(graphs) == len(others) and all(map(torch.equal, graphs, others))


@pytest.mark.parametrize("topology", STATIC, ids=described)
def test_a_graph_that_nothing_changes_is_that_of_round_zero_in_all_rounds(topology: Topology) -> None:
    assert not topology.varies
    assert equal(rounds(topology), [topology.adjacency(seed=1)] * 12)
    assert torch.equal(topology.at(2, 5), topology.adjacency(seed=2))


def test_a_static_graph_is_made_once_per_seed_and_stays_as_it_is_whatever_a_caller_does_to_it() -> None:
    star = Star(5)
    star.at(0, 0).fill_(True)
    assert equal(rounds(star, seed=0), [star.adjacency(seed=0)] * 12)
    assert star.graphs_made == 2  # one for all rounds, one for adjacency


@varying_or_silent
def test_every_round_has_its_own_graph_which_follows_from_the_seed_alone(make: Callable[..., Topology]) -> None:
    topology = make()
    graphs = rounds(topology)
    assert topology.varies
    assert not torch.equal(graphs[0], graphs[-1])
    assert not equal(graphs, rounds(topology, seed=2))
    assert equal(graphs, rounds(make()))
    assert equal(graphs[::-1], [topology.at(1, index) for index in reversed(range(12))])
    assert torch.equal(graphs[7], make().at(1, 7))  # what a resumed run asks for first


@varying_or_silent
def test_the_graph_of_any_round_is_symmetric_without_self_loops(make: Callable[..., Topology]) -> None:
    for graph in rounds(make()):
        assert graph.dtype == torch.bool
        assert graph.shape == (20, 20)
        assert torch.equal(graph, graph.T)
        assert not graph.diagonal().any()


@varying
def test_adjacency_is_the_graph_of_round_zero(make: Callable[..., Topology]) -> None:
    topology = make()
    assert torch.equal(topology.at(1, 0), topology.adjacency(1))
    topology.at(1, 8)
    assert torch.equal(topology.at(1, 0), topology.adjacency(1))


@varying
def test_graphs_that_vary_follow_the_run_seed_unless_they_have_their_own(make: Callable[..., Topology]) -> None:
    assert equal(rounds(make(seed=5), seed=1), rounds(make(seed=5), seed=2))
    assert equal(rounds(make(seed=5), seed=1), rounds(make(), seed=5))


def test_redrawing_leaves_the_first_graph_as_it_was() -> None:
    first = nx.fast_gnp_random_graph(20, 0.5, seed=derive_seed(1, "topology", 0))
    assert nx.utils.graphs_equal(ErdosRenyi(20, 0.5).graph(1), first)
    assert nx.utils.graphs_equal(ErdosRenyi(20, 0.5, redraw_every=1).graph_at(1, 0), first)
    first = nx.random_regular_graph(4, 20, seed=derive_seed(1, "topology", 0))
    assert nx.utils.graphs_equal(KRegular(20, 4).graph(1), first)
    assert nx.utils.graphs_equal(KRegular(20, 4, redraw_every=1).graph_at(1, 0), first)


@pytest.mark.parametrize(
    "make", [lambda every: ErdosRenyi(20, 0.3, redraw_every=every), lambda every: KRegular(20, 4, redraw_every=every)]
)
def test_a_graph_lasts_for_as_many_rounds_as_redraw_every_says(make: Callable[[int], Topology]) -> None:
    graphs = rounds(make(1), count=4)
    assert not any(torch.equal(graphs[i], graphs[j]) for i in range(4) for j in range(i))
    assert equal(rounds(make(3)), [graph for graph in graphs for _ in range(3)])


@pytest.mark.parametrize("k", [2, 4, 15])
def test_every_redrawn_regular_graph_is_regular_and_connected(k: int) -> None:
    topology = KRegular(20, k, redraw_every=1)
    for index, graph in enumerate(rounds(topology)):
        assert graph.sum(1).tolist() == [k] * 20
        assert nx.is_connected(topology.graph_at(1, index))


def test_every_redrawn_graph_is_redrawn_refused_or_kept_if_it_is_disconnected() -> None:
    kept = ErdosRenyi(20, 0.12, if_disconnected="keep", redraw_every=1)
    redrawn = ErdosRenyi(20, 0.12, redraw_every=1)
    refusing = ErdosRenyi(20, 0.12, if_disconnected="refuse", redraw_every=1)
    connected = [nx.is_connected(kept.graph_at(1, index)) for index in range(20)]
    assert any(connected[1:])
    assert not all(connected[1:])
    for index in range(1, 20):
        assert nx.is_connected(redrawn.graph_at(1, index))
        if connected[index]:
            assert torch.equal(refusing.at(1, index), kept.at(1, index))
            assert torch.equal(redrawn.at(1, index), kept.at(1, index))
        else:
            with pytest.raises(UserError, match=f"drawn for round {index} with seed 1 is not connected; .* chance"):
                refusing.at(1, index)


@pytest.mark.parametrize("radius", [0.1, 0.3, 2.0])
def test_moving_nodes_hear_exactly_those_within_the_radius(radius: float) -> None:
    topology = Mobility(20, radius)
    for index in (0, 1, 50):
        places = topology.positions(1, index).tolist()
        near = [[i != j and math.dist(places[i], places[j]) <= radius for j in range(20)] for i in range(20)]
        assert topology.at(1, index).tolist() == near


@pytest.mark.parametrize("speed", [0.05, 0.7, 2.5])
def test_moving_nodes_are_where_single_steps_with_reflection_take_them(speed: float) -> None:
    topology = Mobility(50, 0.3, speed=speed)
    still, slow = topology.positions(1, 0), Mobility(50, 0.3, speed=1e-6)
    step = (slow.positions(1, 1) - still) * 1e6 * speed  # so short a step reflects nobody
    place = still.clone()
    for index in range(1, 200):
        place += step
        while (outside := (place < 0) | (place > 1)).any():
            place = torch.where(place < 0, -place, torch.where(place > 1, 2 - place, place))
            step = torch.where(outside, -step, step)
        torch.testing.assert_close(topology.positions(1, index), place, rtol=0, atol=1e-6)


def test_moving_nodes_stay_in_the_square_and_cover_their_speed_unless_they_are_reflected() -> None:
    topology, away_from_borders = Mobility(50, 0.3, speed=0.05), 0
    for index in range(200):
        here, there = topology.positions(1, index), topology.positions(1, index + 1)
        moved = (there - here).norm(dim=1)
        inner = ((here - 0.5).abs() < 0.45).all(1)
        assert here.min() >= 0
        assert here.max() <= 1
        assert moved.max() <= 0.05 + 1e-12
        torch.testing.assert_close(moved[inner], torch.full_like(moved[inner], 0.05))
        away_from_borders += int(inner.sum())
    assert away_from_borders > 5000


def test_moving_nodes_start_anywhere_and_head_anywhere() -> None:
    topology = Mobility(4000, 0.3)
    start = topology.positions(1, 0)
    for where in (start, topology.positions(1, 77)):
        quarters = (where > 0.5).long() @ torch.tensor([1, 2])
        assert quarters.bincount().div(4000).tolist() == pytest.approx([0.25] * 4, abs=0.03)
    inner = ((start - 0.5).abs() < 0.45).all(1)
    heading = (topology.positions(1, 1) - start)[inner] / 0.05
    assert heading.mean(0).tolist() == pytest.approx([0, 0], abs=0.05)
    assert heading.square().mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.03)


def test_a_disconnected_graph_of_moving_nodes_is_refused_in_its_round_or_kept() -> None:
    kept, refusing = Mobility(20, 0.35), Mobility(20, 0.35, if_disconnected="refuse")
    connected = [nx.is_connected(kept.graph_at(1, index)) for index in range(100)]
    assert any(connected)
    assert not all(connected)
    for index in range(100):
        if connected[index]:
            assert torch.equal(refusing.at(1, index), kept.at(1, index))
        else:
            with pytest.raises(UserError, match=f"round {index} is not connected.* raise topology.radius"):
                refusing.at(1, index)


@silent
def test_silent_nodes_have_no_neighbours_and_the_others_keep_theirs(make: Callable[..., Topology]) -> None:
    topology = make()
    talking = make()
    talking.silent = 0.0
    for index, graph in enumerate(rounds(topology)):
        quiet = topology.silent_nodes(1, index)
        assert not graph[quiet].any()
        assert not graph[:, quiet].any()
        assert torch.equal(graph[~quiet][:, ~quiet], talking.at(1, index)[~quiet][:, ~quiet])
    assert torch.equal(topology.adjacency(1), talking.adjacency(1))


def test_nodes_of_a_graph_from_a_file_can_be_silent(tmp_path: Path) -> None:
    topology = from_file(tmp_path, silent=0.5)
    assert topology.varies
    assert not from_file(tmp_path).varies
    assert equal(rounds(topology), [topology.adjacency(1) & graph for graph in rounds(FullyConnected(4, silent=0.5))])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 0.99])
def test_nodes_are_silent_as_often_as_asked_for_each_on_its_own(share: float) -> None:
    topology = Ring(20, silent=share)
    quiet = torch.stack([topology.silent_nodes(1, index) for index in range(3000)]).double()
    assert quiet.mean().item() == pytest.approx(share, abs=0.01)
    assert quiet.mean(0).tolist() == pytest.approx([share] * 20, abs=0.05)
    together = [quiet[:-1] * quiet[1:], quiet[:, :-1] * quiet[:, 1:]]  # in the next round, and the next node
    assert [both.mean().item() for both in together] == pytest.approx([share**2] * 2, abs=0.02)
