"""SketchGuard: screen by sketches, fetch whole models only from those accepted, and check what was fetched."""

from typing import Any

from callbacks.aggregators.balance import BALANCE

SKETCH_SIZE = 1000


class SketchGuard(BALANCE):
    """BALANCE's threshold on Count Sketches of k numbers; only accepted models travel (SketchGuard, Alg. 1).

    Every node sends its sketch to its neighbours; a neighbour within gamma exp(-kappa t/T) times the norm of the own
    sketch is accepted; its model is fetched, its sketch recomputed, and it is dropped if that is not the one it had
    announced. The mean of the rest is mixed with the own model. A node receives k |N_i| + d |S_i| parameters.

    As published, it is open to attackers who know the hash (``NullSpace``): ``distance_check`` or ``commit_reveal``
    close that.

    Args:
        sketch_size: k, the numbers in a sketch (default: 1000, unless epsilon and delta say it).
    """

    def __init__(self, sketch_size: int | None = None, **options: Any) -> None:
        if sketch_size is None and options.get("epsilon") is None and options.get("delta") is None:
            sketch_size = SKETCH_SIZE
        super().__init__(sketch_size=sketch_size, **options)
