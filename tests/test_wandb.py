"""What a run tells W&B, read back from an offline run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = 32_768  # W&B's offline file: a header of 7 bytes, then LevelDB's log format


def chunks(content):
    """The payloads of the log's records; one may be cut over several blocks."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """All records of a short offline run of the quickstart, in a process of its own since W&B keeps global state."""
    from wandb.proto.wandb_internal_pb2 import Record

    folder = tmp_path_factory.mktemp("wandb")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(folder), "NETRC": str(folder / "none")}  # nobody is logged in here
    arguments = [f"--config={ROOT / 'configs/quickstart.yaml'}", "--trainer.max_epochs=2", "--data.local_epochs=1"]
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("runs/quickstart/version_0/wandb/offline-run-*/*.wandb")
    found = []
    for chunk in chunks(file.read_bytes()):
        record = Record()
        record.ParseFromString(chunk)
        found.append(record)
    return found, done.stderr


def items(updates):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}


def test_without_a_key_a_run_is_recorded_offline_and_says_so(records):
    assert "W&B has no API key here, so it records offline" in records[1]


def test_one_row_per_round_holds_ter_and_traffic(records):
    rows = [items(record.history.item) for record in records[0] if record.HasField("history")]
    rounds = [row for row in rows if "round" in row]
    assert [row["round"] for row in rounds] == [1, 2]
    for row in rounds:
        assert {
            "ter/mean",
            "ter/worst",
            "traffic/bytes",
            "traffic/reduction",
            "screening/accepted_honest",
        } <= row.keys()


def test_config_environment_and_pictures_go_along(records):
    config = {}
    for record in records[0]:
        for updates in (record.run.config.update, record.config.update):
            config |= items(updates)
    assert config["aggregator"]["init_args"]["sketch_size"] == 200
    assert len(config["environment"]["data_fingerprint"]) == 16
    keys = {key for record in records[0] if record.HasField("history") for key in items(record.history.item)}
    assert any(key.startswith("pictures/topology") for key in keys)
