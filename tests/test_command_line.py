"""train.py as its user meets it."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import train
from dfl_lightning import load_node

ROOT = Path(__file__).parents[1]
QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
SHORT = ["--trainer.max_epochs=2", "--data.local_epochs=1", "--trainer.accelerator=cpu"]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs train.py in an empty folder; gives exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        try:
            train.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        streams = capsys.readouterr()
        return status, streams.out, streams.err

    return run


@pytest.mark.parametrize("mode", ["nonsense", "online"])
def test_a_wandb_mode_that_cannot_work_is_refused(mode, command, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert f"WANDB_MODE is {mode}" in refused(command, QUICKSTART)


def refused(command, *arguments):
    """The one line that a refused command prints."""
    status, out, err = command(*arguments)
    lines = [line for line in (out + err).splitlines() if line]
    assert status != 0
    assert len(lines) == 1, lines
    assert lines[0].startswith("train.py: error: ")
    return lines[0]


SMALL = {
    "ErdosRenyi": ["--topology.num_nodes=4", "--topology.p=0.9"],
    "Mobility": ["--topology.num_nodes=4"],
    "Server": ["--topology.clients=8", "--topology.ratio=null", "--topology.clients_per_round=4"],
    "FemnistCNN": ["--model.network.size=tiny"],
    "CIFAR10": ["--data.rendered_samples=200"],
    "CIFAR100": ["--data.rendered_samples=400", "--data.min_samples=2"],
    "ImageNet12": ["--data.rendered_samples=120", "--data.size=48", "--data.min_samples=2"],
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_config_trains(config, command):
    """With few and small data, on rendered stand-ins where the real ones are not there."""
    content = yaml.safe_load(config.read_text())
    names = [content[section]["class_path"] for section in ("topology", "data")]
    small = [change for name in [*names, content["model"]["network"]["class_path"]] for change in SMALL.get(name, [])]
    small += ["--data.max_samples=20", "--data.local_epochs=1", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    status, out, err = command(f"--config={config}", *small)
    assert status == 0, err
    assert "TER, mean over honest nodes" in out


def test_a_run_leaves_everything_that_tells_about_it(command, tmp_path):
    status, out, _ = command(QUICKSTART, *SHORT)
    folder = tmp_path / "runs/quickstart/version_0"
    assert status == 0
    assert "runs/quickstart/version_0" in out
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [row["round"] for row in rows] == ["1", "2"]
    assert 0 <= float(rows[-1]["ter/mean"]) <= float(rows[-1]["ter/worst"]) <= 1
    nodes = list(csv.DictReader((folder / "nodes.csv").open()))
    assert sum(node["byzantine"] == "True" for node in nodes) == 3
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]["local_epochs"] == 1
    environment = json.loads((folder / "environment.json").read_text())
    assert re.fullmatch("[0-9a-f]{16}", environment["data_fingerprint"])
    assert {"topology.png", "samples.png"} <= {path.name for path in folder.iterdir()}
    assert isinstance(load_node(folder / "checkpoints/last.ckpt", 3), torch.nn.Module)


def test_the_saved_config_repeats_the_run(command, tmp_path):
    command(QUICKSTART, *SHORT)
    command(f"--config={tmp_path / 'runs/quickstart/version_0/config.yaml'}", "--name=again")
    ter = [[row["ter/mean"] for row in csv.DictReader(path.open())] for path in sorted(tmp_path.rglob("metrics.csv"))]
    assert ter[0] == ter[1]


def test_a_run_resumes_into_a_folder_of_its_own_with_its_whole_history(command, tmp_path):
    command(QUICKSTART, *SHORT)
    last = tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt"
    longer = ["--trainer.max_epochs=3", "--model.allow_other_total=true", *SHORT[1:]]
    status, out, _ = command(QUICKSTART, *longer, "--ckpt_path", last)
    assert status == 0
    assert "After round 3 of 3" in out
    rows = list(csv.DictReader((tmp_path / "runs/quickstart/version_1/metrics.csv").open()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]


def test_evaluate_measures_without_training_or_leaving_anything(command, tmp_path):
    _, trained, _ = command(QUICKSTART, *SHORT)
    before = sorted(tmp_path.rglob("*"))
    status, out, _ = command(
        QUICKSTART, *SHORT, "--evaluate", tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt"
    )
    assert status == 0
    assert sorted(tmp_path.rglob("*")) == before
    measured = re.search(r"ter/mean (\d\.\d{3})", out)[1]
    assert measured == re.search(r"TER, mean over honest nodes\W+(\d\.\d{3})", trained)[1]


@pytest.mark.parametrize("change", ["--seed_everything=2", "--data.test_share=0.5", "--attack=null"])
def test_nodes_are_never_measured_on_what_they_may_have_trained_on(change, command, tmp_path):
    command(QUICKSTART, *SHORT)
    last = tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt"
    for option in ("--evaluate", "--ckpt_path"):
        status, _, err = command(QUICKSTART, *SHORT, change, option, last)
        assert status == 2
        assert "The checkpoint was made" in err.splitlines()[-1]


def test_overrides_by_name_and_null_sections(command):
    status, out, err = command(QUICKSTART, *SHORT, "--attack=null", "--aggregator=BALANCE", "--aggregator.gamma=1.5")
    assert status == 0, err
    assert "accepted Byzantine neighbours" not in out
    status, out, err = command(QUICKSTART, *SHORT, "--attack=None", "--aggregator=null")
    assert status == 0, err
    assert "parameters received per honest node and round" in out


def test_print_config_shows_overrides_late_interpolation_and_later_configs(command, tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {lr: '${data.init_args.beta}'}\n")
    status, out, _ = command("--data.beta=0.25", QUICKSTART, "--config", "mine.yaml", "--print_config")
    config = yaml.safe_load(out)
    assert status == 0
    assert config["model"]["lr"] == config["data"]["init_args"]["beta"] == 0.25


def test_help_fits_a_screen_and_points_further(command):
    status, out, _ = command("--help")
    assert status == 0
    assert len(out.splitlines()) <= 40
    assert "--aggregator.help=SketchGuard" in out
    status, out, _ = command("--aggregator.help=SketchGuard")
    assert status == 0
    assert "sketch_size" in out


def test_a_users_own_class_is_found_in_the_working_folder(command, tmp_path):
    (tmp_path / "my_parts.py").write_text(
        "from callbacks.aggregators import DFedAvg\n"
        "class MyRule(DFedAvg):\n"
        "    def __init__(self, strength: int = 1):\n"
        "        super().__init__()\n"
    )
    status, _, err = command(QUICKSTART, *SHORT, "--aggregator=my_parts.MyRule", "--aggregator.strength=2")
    assert status == 0, err


BAD = {
    "a misspelt key": (["--aggregator.gama=2"], "no setting gama. Did you mean gamma?"),
    "a misspelt model key": (["--model.lrr=2"], "no setting model.lrr. Did you mean model.lr?"),
    "a misspelt section": (["--agregator=BALANCE"], "no setting agregator. Did you mean aggregator?"),
    "a misspelt Trainer option": (["--trainer.max_epoch=2"], "Did you mean trainer.max_epochs?"),
    "a misspelt class": (["--aggregator=SketchGard"], "Did you mean SketchGuard?"),
    "a wrong type": (["--model.lr=fast"], "model.lr is fast, but it must be float"),
    "a wrong choice": (
        ["--aggregator.verification=maybe"],
        "verification is maybe, but it must be each or batched or none",
    ),
    "an impossible fraction": (["--attack.fraction=1.7"], "attack.fraction is 1.7"),
    "an attacker that does not exist": (["--attack.nodes=[11]"], "node 11, but the nodes are 0 to 9"),
    "odd n*k": (["--topology=KRegular", "--topology.num_nodes=5", "--topology.k=3"], "must be even"),
    "max_steps": (["--trainer.max_steps=5"], "trainer.max_steps is 5"),
    "max_time": (["--trainer.max_time=00:00:01:00"], "trainer.max_time"),
    "val_check_interval": (["--trainer.val_check_interval=0.5"], "trainer.val_check_interval is 0.5"),
    "accumulate_grad_batches": (["--trainer.accumulate_grad_batches=2"], "trainer.accumulate_grad_batches is 2"),
    "gradient_clip_val": (["--trainer.gradient_clip_val=1"], "model.clip_norm"),
    "16-true": (["--trainer.precision=16-true"], "trainer.precision is 16-true"),
    "too many nodes": (["--topology.num_nodes=3000"], "3000 nodes"),
    "no checkpoint": (["--ckpt_path=nowhere.ckpt"], "ckpt_path is nowhere.ckpt"),
    "an empty checkpoint": (["--evaluate="], "evaluate is empty"),
    "two checkpoints": (["--evaluate=train.log", "--ckpt_path=train.log"], "evaluate and ckpt_path are both given"),
    "an abstract rule": (["--aggregator=dfl_lightning.Aggregator"], "aggregator is dfl_lightning.Aggregator"),
    "a rule that is none": (["--aggregator=os.system"], "aggregator is os.system"),
    "a module that is none": (["--attack=no.Such"], "No module named 'no'"),
    "a foreign datamodule": (["--data=lightning.LightningDataModule"], "data is lightning.LightningDataModule"),
    "a seed out of range": (["--seed_everything=-1"], "seed_everything is -1"),
    "a hash seed out of range": (["--aggregator.hash_seed=-1"], "aggregator.hash_seed is -1"),
    "a sketch out of range": (["--aggregator.sketch_size=9999999999"], "aggregator.sketch_size is 9999999999"),
    "no devices": (["--trainer.devices=0"], "devices"),
    "an unknown strategy": (["--trainer.strategy=nonsense"], "nonsense"),
    "an impossible optimizer": (
        ["--model.optimizer=Adam", "--model.momentum=0", "--model.optimizer.lr=-1"],
        "rate: -1",
    ),
    "an optimizer that needs closures": (["--model.optimizer=torch.optim.LBFGS", "--model.momentum=0"], "LBFGS"),
    "a config that is a list": (["--config=list.yaml"], "A config must be a mapping of sections"),
    "a config that is no text": (["--config=binary.yaml"], "should be text"),
    "another strategy": (["--trainer.strategy=ddp"], "trainer.strategy is DDPStrategy"),
    "rounds without number": (["--trainer.max_epochs=null"], "trainer.max_epochs is null"),
    "no validation ever": (["--trainer.check_val_every_n_epoch=0"], "trainer.check_val_every_n_epoch is 0"),
    "no training": (["--trainer.limit_train_batches=0"], "trainer.limit_train_batches is 0"),
    "a file in place of the run's folder": (["--name=train.log/run"], "train.log"),
    "a network for other classes": (["--model.network.num_classes=7"], "the data has 10 classes"),
    "a network for other images": (["--model.network=CelebACNN"], "images of shape [1, 8, 8]"),
    "an interpolation of nothing": (["--model.lr=${nothing}"], "nothing"),
    "no such config": (["--config=nowhere.yaml"], "nowhere.yaml"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_one_sentence(case, command, tmp_path):
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xb2\xff")
    (tmp_path / "train.log").write_text("")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/train.log").write_text("")
    arguments, sentence = BAD[case]
    assert sentence in refused(command, QUICKSTART, *arguments)


def test_a_checkpoint_of_another_network_is_refused(command, tmp_path):
    command(QUICKSTART, *SHORT)
    last = tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt"
    (tmp_path / "other.py").write_text(
        "from torch import nn\n"
        "class Other(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        line = command(QUICKSTART, *SHORT, "--model.network=other.Other", "--ckpt_path", last)[2].splitlines()[-1]
    finally:
        sys.path.remove(str(tmp_path))
    assert "The checkpoint holds another network" in line


def test_nothing_heavy_is_imported_to_refuse_a_config():
    """Start-up is mostly `import lightning`; what it does not load itself must wait until it is used."""
    script = (
        "import sys, lightning, lightning.pytorch.cli\nbefore = set(sys.modules)\nimport train\n"
        "heavy = {'wandb', 'matplotlib.pyplot', 'networkx', 'sklearn', 'datasets', 'pyarrow'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
