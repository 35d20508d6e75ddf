"""Checkpoints: whole or not at all, resumable to the bit, opened node by node."""

import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from callbacks.aggregators import SketchGuard
from callbacks.attacks import Gaussian
from dfl_lightning import AtomicCheckpointIO, DFLModule, FullyConnected, Ring, UserError, load_node
from dfl_lightning.checkpoint import KEYS, read_checkpoint
from dfl_lightning.networks import DigitsCNN

BARE = dict.fromkeys(KEYS)  # what a checkpoint must have to be taken for one


class StopAfter(Callback):
    """Ends a run as a crash would, after some rounds."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.rounds:
            raise RuntimeError("power cut")


def figures(module):
    return [{key: value for key, value in row.items() if "time" not in key} for row in module.history]


@pytest.fixture
def world(fit, tiny_net, tmp_path):
    """A function that runs six rounds with checkpoints into a folder of that name."""

    def run(name, *callbacks, make=None, settings=None, **options):
        module = DFLModule(
            make or partial(tiny_net, norm=True), Ring(4), **({"lr": 0.1, "momentum": 0.9} | (settings or {}))
        )
        keep = ModelCheckpoint(tmp_path / name, "last", save_on_train_epoch_end=True, enable_version_counter=False)
        options = {"max_epochs": 6, "enable_checkpointing": True} | options
        return fit(Gaussian(nodes=[1]), SketchGuard(sketch_size=10), keep, *callbacks, module=module, **options)

    return run


@pytest.fixture
def broken_off(world, tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        world("broken", StopAfter(3))
    return tmp_path / "broken" / "last.ckpt"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"keep_optimizer": True},
        {"optimizer": partial(torch.optim.Adam, lr=0.01), "lr": 0.05, "momentum": 0.0, "keep_optimizer": True},
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(world, settings, tmp_path):
    whole = world("whole", settings=settings)
    with pytest.raises(RuntimeError, match="power cut"):
        world("broken", StopAfter(3), settings=settings)
    torch.rand(7)  # the global generator is elsewhere now
    resumed = world("resumed", settings=settings, ckpt_path=tmp_path / "broken" / "last.ckpt")
    assert torch.equal(resumed.replicas.rows, whole.replicas.rows)
    assert torch.equal(
        resumed.replicas.counters["norm.num_batches_tracked"], whole.replicas.counters["norm.num_batches_tracked"]
    )
    assert figures(resumed) == figures(whole)


def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    script = f"""
import torch
from dfl_lightning import AtomicCheckpointIO
number = 0
while True:
    number += 1
    state = {{"dfl_lightning": {BARE!r} | {{"total": number}}, "rows": torch.full((3_000_000,), float(number))}}
    AtomicCheckpointIO().save_checkpoint(state, {str(tmp_path / "last.ckpt")!r})
    print(number, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        assert process.stdout.readline()
    time.sleep(0.013)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    content = read_checkpoint(tmp_path / "last.ckpt")
    assert content["rows"].eq(content["dfl_lightning"]["total"]).all()


def test_a_failed_save_keeps_the_old_checkpoint_and_leaves_no_litter(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"dfl_lightning": BARE}, path)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        AtomicCheckpointIO().save_checkpoint({"dfl_lightning": lambda: None}, path)
    assert read_checkpoint(path) == {"dfl_lightning": BARE}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    torch.save({"dfl_lightning": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(UserError, match="damaged or no checkpoint"):
        read_checkpoint(tmp_path / "bomb.ckpt")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_a_damaged_checkpoint_is_refused(content, tmp_path):
    (tmp_path / "bad.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.ckpt"):
        read_checkpoint(tmp_path / "bad.ckpt")


def test_a_missing_or_foreign_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="There is no checkpoint"):
        read_checkpoint(tmp_path / "none.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(UserError, match="something else"):
        read_checkpoint(tmp_path / "foreign.ckpt")


def test_another_network_is_refused_by_name(world, tiny_net, broken_off):
    with pytest.raises(UserError, match=r"norm\.weight.*absent in model\.network"):
        world("other", make=tiny_net, ckpt_path=broken_off)


def test_another_number_of_rounds_is_refused_unless_allowed(world, broken_off):
    with pytest.raises(UserError, match=r"6 rounds, but trainer\.max_epochs is 8"):
        world("longer", max_epochs=8, ckpt_path=broken_off)
    longer = world("longer", settings={"allow_other_total": True}, max_epochs=8, ckpt_path=broken_off)
    assert len(longer.history) == 8


def test_another_seed_topology_or_number_of_nodes_is_refused(world, fit, tiny_net, broken_off):
    seed_everything(2, verbose=False)
    with pytest.raises(UserError, match="seed 1, but seed_everything is 2"):
        world("seed", ckpt_path=broken_off)
    seed_everything(1, verbose=False)
    make = partial(tiny_net, norm=True)
    same = Gaussian(nodes=[1]), SketchGuard(sketch_size=10)
    with pytest.raises(UserError, match="topology's class Ring, but here it is FullyConnected"):
        fit(*same, module=DFLModule(make, FullyConnected(4), lr=0.1, momentum=0.9), max_epochs=6, ckpt_path=broken_off)
    with pytest.raises(UserError, match="4 nodes, but the topology has 5"):
        fit(module=DFLModule(make, Ring(5)), max_epochs=6, ckpt_path=broken_off)
    with pytest.raises(UserError, match=r"Byzantine nodes \[1\], but here they are \[\]"):
        fit(module=DFLModule(make, Ring(4)), max_epochs=6, ckpt_path=broken_off)
    with pytest.raises(UserError, match="aggregator's class SketchGuard, but here it is none"):
        fit(
            Gaussian(nodes=[1]),
            module=DFLModule(make, Ring(4), lr=0.1, momentum=0.9),
            max_epochs=6,
            ckpt_path=broken_off,
        )


def test_another_learning_rate_is_refused_rather_than_ignored(world, broken_off):
    with pytest.raises(UserError, match=r"optimizer's lr 0\.1, but here it is 0\.5"):
        world("faster", settings={"lr": 0.5}, ckpt_path=broken_off)


def test_an_optimizer_that_takes_matrices_only_can_be_kept(world, tmp_path):
    class Matrices(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(16, 3, bias=False))

    settings = {"optimizer": partial(torch.optim.Muon, lr=0.01), "lr": 0.05, "momentum": 0.0}
    world("whole", make=Matrices, settings=settings, max_epochs=1)
    assert read_checkpoint(tmp_path / "whole/last.ckpt")["dfl_lightning"]["optimizer"]["class"] == "Muon"


def test_a_checkpoint_of_the_middle_of_a_round_is_refused(world, tmp_path):
    class Midway(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "midway.ckpt")

    world("whole", Midway())
    with pytest.raises(UserError, match="inside a round"):
        world("resumed", ckpt_path=tmp_path / "midway.ckpt")


def test_load_node_gives_the_ordinary_module_of_a_node(world, tiny_net, tmp_path):
    module = world("whole")
    images = torch.rand(5, 1, 4, 4)
    module.eval()
    for node in range(4):
        model = load_node(tmp_path / "whole" / "last.ckpt", node, partial(tiny_net, norm=True))
        assert not model.training
        assert torch.equal(model(images), module.replicas.load(node)(images))
        assert int(model.norm.num_batches_tracked) == int(module.replicas.counters["norm.num_batches_tracked"][node])
        assert all(parameter.is_leaf and parameter.requires_grad for parameter in model.parameters())


class Odd(nn.Module):
    """Tied weights, dropout, a buffer that is not saved, and one that is replaced instead of changed in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("place", torch.ones(16), persistent=False)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, images):
        features = images.flatten(1) * self.place
        if self.training:
            self.average = 0.9 * self.average + 0.1 * features.detach().mean(0)
        return self.head(self.dropout(self.second(self.first(features - self.average).relu())))


def test_odd_networks_keep_nodes_apart_resume_to_the_bit_and_open(world, tmp_path):
    whole = world("whole", make=Odd)
    averages = torch.stack([dict(whole.replicas.named_views(node))["average"] for node in range(4)])
    assert (averages.std(0) > 0).any()
    with pytest.raises(RuntimeError, match="power cut"):
        world("broken", StopAfter(3), make=Odd)
    torch.rand(7)
    resumed = world("resumed", make=Odd, ckpt_path=tmp_path / "broken" / "last.ckpt")
    assert torch.equal(resumed.replicas.rows, whole.replicas.rows)
    images = torch.rand(5, 1, 4, 4)
    whole.eval()
    assert torch.equal(load_node(tmp_path / "whole/last.ckpt", 2, Odd)(images), whole.replicas.load(2)(images))


def test_a_checkpoint_that_lacks_something_is_refused_by_name(tmp_path):
    AtomicCheckpointIO().save_checkpoint({"dfl_lightning": {"total": 1}}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match="lacks aggregator, attack, byzantine"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_load_node_builds_the_class_that_the_checkpoint_names(fit, tmp_path, blobs):
    class Wide(blobs):
        num_classes = 10

        def load(self, num_nodes, seed):
            data = super().load(num_nodes, seed)
            for split in (data.train, data.test):
                split.images = split.images.repeat(1, 1, 2, 2)
            return data

    keep = ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
    module = DFLModule(partial(DigitsCNN, num_classes=10), Ring(3), lr=0.1)
    fit(keep, module=module, data=Wide(batch_size=8), enable_checkpointing=True)
    model = load_node(tmp_path / "last.ckpt", 2)
    assert isinstance(model, DigitsCNN)
    assert torch.equal(next(model.parameters()), dict(module.replicas.named_views(2))[next(iter(model.state_dict()))])


def test_load_node_refuses_what_it_cannot_give(world, tmp_path, tiny_net):
    world("whole", max_epochs=1)
    path = tmp_path / "whole" / "last.ckpt"
    with pytest.raises(UserError, match="no node 4; its nodes are 0 to 3"):
        load_node(path, 4)
    with pytest.raises(UserError, match="not the network"):
        load_node(path, 0, tiny_net)
    content = torch.load(path, weights_only=True)
    for network, reason in (
        (None, "does not name"),
        ({"class_path": "this.Net", "init_args": {}}, "not been imported"),
    ):
        content["dfl_lightning"]["network"] = network
        torch.save(content, tmp_path / "changed.ckpt")
        with pytest.raises(UserError, match=reason):
            load_node(tmp_path / "changed.ckpt", 0)
    assert "this" not in sys.modules  # which would have been executed by its import
