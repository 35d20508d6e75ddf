"""Pictures of what a run is about to do: who talks to whom, and which data each node holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from dfl_lightning.data import NodeData
from dfl_lightning.report import run_folder

if TYPE_CHECKING:  # matplotlib and networkx cost half a second each, so they are imported where they draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HONEST, BYZANTINE, EDGE = "#4477aa", "#ee6677", "#555555"  # told apart by colour-blind readers too
MOST_NUMBERED = 100  # nodes; the numbers of more would not be readable
IMAGES_PER_NODE = 8
LONGEST_NAME = 12  # characters of a class name above an image


class Pictures(Callback):
    """Writes ``topology.png`` and ``samples.png`` into the run's folder before training starts."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if (folder := run_folder(trainer)) is None:
            return
        drawn = ["samples"]
        if not pl_module.topology.central:
            drawn.append("topology")
            draw_topology(pl_module.neighbours, pl_module.byzantine, folder / "topology.png")
        draw_samples(trainer.datamodule.nodes, folder / "samples.png")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                for name in drawn:
                    logger.log_image(f"pictures/{name}", [str(folder / f"{name}.png")])


def draw_topology(adjacency: Tensor, byzantine: Tensor, path: str | Path) -> None:
    """Draws the graph; Byzantine nodes differ from honest ones in colour and shape.

    Args:
        adjacency: bool [N, N], symmetric.
        byzantine: bool [N].
        path: the PNG file to write.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    adjacency, byzantine = adjacency.cpu(), byzantine.cpu()
    num_nodes, edges = len(adjacency), adjacency.triu(1).nonzero()
    figure = Figure(figsize=(9, 9.4), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), aspect="equal")
    places = _layout(adjacency)
    many = max(1, len(edges))
    width, alpha = min(1.2, max(0.4, 12 / many**0.5)), min(0.6, max(0.01, 250 / many))  # the more ink, the lighter
    axes.add_collection(LineCollection(list(places[edges].numpy()), colors=EDGE, linewidths=width, alpha=alpha))
    size = min(450.0, max(22.0, 11000 / num_nodes))  # square points, about the area of a node
    for members, colour, shape, name in ((~byzantine, HONEST, "o", "honest"), (byzantine, BYZANTINE, "s", "Byzantine")):
        across, up = places[members].T.numpy()
        axes.scatter(
            across, up, s=size, c=colour, marker=shape, edgecolors="white", linewidths=0.6,
            label=f"{name} ({int(members.sum())})", zorder=2,
        )  # fmt: skip
    if num_nodes <= MOST_NUMBERED:
        for node, (x, y) in enumerate(places.tolist()):
            axes.text(x, y, str(node), size=0.47 * size**0.5, color="white", ha="center", va="center", zorder=3)
    degree = 2 * len(edges) / num_nodes
    axes.set_title(f"{num_nodes} nodes, {len(edges):,} edges, mean degree {degree:.3g}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, markerscale=(80 / size) ** 0.5)
    figure.savefig(path)


def _layout(adjacency: Tensor) -> Tensor:
    """Places [N, 2] within [-1, 1]: rings (in their order) and complete graphs on a circle, others as springs pull."""
    import networkx as nx

    num_nodes, degrees = len(adjacency), adjacency.sum(1)
    graph = nx.from_numpy_array(adjacency.numpy())
    ring = num_nodes > 2 and bool((degrees == 2).all()) and nx.is_connected(graph)
    if ring or bool((degrees == num_nodes - 1).all()):
        order = list(nx.dfs_preorder_nodes(graph, 0))
        angles = torch.empty(num_nodes)
        angles[order] = torch.pi / 2 - torch.arange(num_nodes) * 2 * torch.pi / num_nodes
        return torch.stack([angles.cos(), angles.sin()], dim=1)
    springs = nx.spring_layout(graph, seed=0, k=3 / num_nodes**0.5, iterations=100)
    places = torch.tensor([springs[node].tolist() for node in range(num_nodes)])
    low, high = places.amin(0), places.amax(0)
    return (2 * places - low - high) / (high - low)  # fill the picture in both directions


def draw_samples(data: NodeData, path: str | Path, max_nodes: int = 10) -> None:
    """Draws a few training images of some nodes, and how many training samples of each label every node has.

    Args:
        data: what the nodes hold.
        path: the PNG file to write.
        max_nodes: images are shown of at most so many nodes.
    """
    from matplotlib.figure import Figure

    num_nodes = len(data.train.indices)
    shown = torch.linspace(0, num_nodes - 1, min(num_nodes, max_nodes)).long().tolist()
    figure = Figure(figsize=(15, 1.6 + 0.72 * max(len(shown), 6)), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
    _draw_images(left, data, shown)
    _draw_label_counts(figure, right, data)
    figure.suptitle(data.source, size=10, wrap=True, parse_math=False)
    figure.savefig(path)


def _class_names(data: NodeData) -> list[str]:
    return data.class_names or [str(label) for label in range(int(data.train.labels.max()) + 1)]


def _draw_images(axes: "Axes", data: NodeData, shown: list[int]) -> None:
    """One row of cells per node, each cell an image under the name of its class."""
    split, names = data.train, _class_names(data)
    height, width = split.images.shape[-2:]
    for row, node in enumerate(shown):
        rows = split.indices[node]
        # Evenly spaced, since a node's samples are often sorted by label or by user.
        some = rows[torch.linspace(0, len(rows) - 1, min(len(rows), IMAGES_PER_NODE)).long()] if len(rows) else rows
        for column, (image, label) in enumerate(zip(split.images[some], split.labels[some].tolist())):
            box = (column + 0.05, column + 0.95, row + 0.95, row + 0.25)  # left, right, bottom, top
            pixels = image[0] if len(image) == 1 else image.movedim(0, -1)  # [H, W] or [H, W, C]
            axes.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=255, extent=box)
            axes.text(column + 0.5, row + 0.21, _short(names[label]), size=6.5, ha="center", parse_math=False)
    axes.set(xlim=(0, IMAGES_PER_NODE), ylim=(len(shown), 0), aspect=0.9 / 0.7 * height / width)
    axes.set_xticks([])
    axes.set_yticks(
        [row + 0.6 for row in range(len(shown))], [_described(data, node) for node in shown], size=8, parse_math=False
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    everyone = len(shown) == len(split.indices)
    axes.set_title("training images" if everyone else f"training images of {len(shown)} of {len(split.indices)} nodes")


def _described(data: NodeData, node: int) -> str:
    """What a node is and holds, in at most three short lines."""
    lines = [f"node {node}", f"{len(data.train.indices[node]):,} samples"]
    if data.users:
        users = data.users[node]
        name = users[0].encode("ascii", "replace").decode()  # fonts lack most other characters
        lines.append(_short(name, 16) if len(users) == 1 else f"{len(users)} users")
    return "\n".join(lines)


def _short(name: str, longest: int = LONGEST_NAME) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _draw_label_counts(figure: "Figure", axes: "Axes", data: NodeData) -> None:
    """A heat map: labels down, nodes across, how many training samples as colour."""
    names = _class_names(data)
    counts = label_counts(data)
    shades = axes.imshow(counts.T.numpy(), cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
    figure.colorbar(shades, ax=axes, label="training samples", pad=0.02)
    across, down = _ticks(len(counts), most=40), _ticks(len(names), most=round(7.5 * figure.get_figheight()))
    axes.set_xticks(across, [str(node) for node in across], size=7)
    axes.set_yticks(down, [_short(names[label]) for label in down], size=7, parse_math=False)
    axes.set(xlabel="node", ylabel="label", title="labels of each node's training samples")


def _ticks(count: int, most: int) -> range:
    """Positions along an axis, a round number apart, at most ``most`` so that their text fits."""
    return range(0, count, next(step for step in (1, 2, 5, 10, 20, 50, 100, count) if count <= step * most))


def label_counts(data: NodeData) -> Tensor:
    """How many training samples of each label every node has: int64 [N, labels]."""
    classes = len(_class_names(data))
    return torch.stack([data.train.labels[rows].bincount(minlength=classes) for rows in data.train.indices])
