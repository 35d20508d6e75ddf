"""What the README shows works as printed."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.fixture
def parts():
    """Everything that the README's Python blocks define."""
    names = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_rule_takes_the_nearest_half(parts):
    vectors = torch.tensor([[0.0], [1.0], [2.5], [10.0], [20.0]])
    _, accepted = parts["NearestHalf"]()(vectors)
    assert accepted[0].tolist() == [False, True, True, False, False]


def test_rule_attack_and_datamodule_train_together(parts, fit):
    from torch import nn

    from dfl_lightning import DFLModule, FullyConnected

    module = DFLModule(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), FullyConnected(5), lr=0.1)
    fit(parts["NearestHalf"](), parts["Opposite"](fraction=0.2), module=module, data=parts["Stripes"](batch_size=8))
    assert module.history[-1]["ter/mean"] < 0.2
    assert "screening/accepted_byzantine" in module.history[-1]


def test_the_plain_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/plain_python.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "honest TER by round" in out
    assert "node 0 accepts [1, 2, 3, 4, 5, 6]" in out


def test_every_file_that_the_readme_names_is_there():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"(?:configs|callbacks|datamodules|examples)/[\w/]+\.\w+", text):
        assert (ROOT / name).exists(), name
