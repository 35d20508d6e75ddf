import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dfl_lightning import FullyConnected, NodeDataModule

SAMPLE = Path(__file__).parents[2].parent / "shared/data/leaf_femnist.tar.xz"

Users = dict[str, tuple[list[Any], list[Any]]]


@pytest.fixture(scope="session")
def femnist_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real FEMNIST in LEAF's format: 51 writers, 7,236 training and 829 test images."""
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE} is not there")
    folder = tmp_path_factory.mktemp("femnist")
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def write_leaf() -> Callable[[Path, Users], None]:
    """Writes one LEAF file with the users' (x, y)."""

    def write(path: Path, users: Users) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        path.write_text(json.dumps(content))

    return write


@pytest.fixture
def characters() -> Callable[[int, int], tuple[list[Any], list[Any]]]:
    """(x, y) of ``count`` different images."""

    def make(count: int, seed: int) -> tuple[list[Any], list[Any]]:
        random = np.random.default_rng(seed)
        pixels = random.integers(0, 256, (count, 784))
        return (pixels / 255).tolist(), random.integers(0, 62, count).tolist()

    return make


@pytest.fixture
def set_up() -> Callable[[NodeDataModule, int], None]:
    """Calls the module's setup as a trainer with so many nodes does."""

    def call(module: NodeDataModule, num_nodes: int) -> None:
        topology = FullyConnected(num_nodes)
        module.trainer = SimpleNamespace(lightning_module=SimpleNamespace(topology=topology), current_epoch=0)  # type: ignore[assignment]
        module.setup("fit")

    return call
