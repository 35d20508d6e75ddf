"""Speed against the physical floor, both measured in the same run, since machines differ and are noisy."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any


def medians(*functions: Callable[[], Any], repeats: int) -> list[float]:
    """Median seconds of each function; they run in turn, so that a slow moment hits all of them. One warm-up each."""
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, spent in zip(functions, seconds):
            begin = time.perf_counter()
            function()
            if turn:
                spent.append(time.perf_counter() - begin)
    return [statistics.median(spent) for spent in seconds]


def report(time_s: float, floor_s: float, **measured: Any) -> None:
    """Prints one JSON line."""
    print(
        json.dumps(
            {"time_s": round(time_s, 4), "floor_s": round(floor_s, 4), "ratio": round(time_s / floor_s, 3), **measured}
        )
    )
