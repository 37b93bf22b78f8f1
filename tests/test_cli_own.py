"""``labkit train`` with the learner's own model, data, loss and optimizer, by import path."""

import json
import os
import subprocess
import sys

import pytest
import warm_python

from labkit.__main__ import main

MODULE = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(6, 3))

class Points(torch.utils.data.Dataset):
    def __init__(self, size):
        self.inputs = torch.randn(size, 6)
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        return self.inputs[index], int(self.inputs[index, 0] > 0)

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def make_dataset():
    return Points(60), Points(20)

def my_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)

def make_optimizer(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-3)

def fails():
    raise ZeroDivisionError("not today")

def makes_3():
    return 3
"""
OWN = {
    "model": "my_work:make_model",
    "dataset": "my_work:make_dataset",
    "loss": "my_work:my_loss",
    "optimizer": "my_work:make_optimizer",
}
WORDS = ["--strategy", "ddp", "--world-size", "2"]


def words_of(**own):
    return [word for name, path in own.items() for word in (f"--{name}", path)]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with the module ``my_work``, and one that raises; the current directory."""
    (tmp_path / "my_work.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    # The script labkit does not have the current directory on its path.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop("my_work", None)


@pytest.mark.parametrize("launcher", ["run", pytest.param("launch", marks=pytest.mark.more)])
def test_own_work_from_the_current_directory_under_torchrun(work, launcher):
    """torch.distributed.launch gives each rank --local-rank=N, too."""
    torchrun = [warm_python.command(), "-m", f"torch.distributed.{launcher}"]
    torchrun += ["--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    torchrun += ["-m", "labkit", "train"]
    words = ["--strategy", "ddp", "--json", "out.json"]
    words += words_of(**OWN | {"model": "my_work:net"})
    # torchrun leaves a folder of logs in the temporary directory: keep it in the test's own.
    settings = {"env": os.environ | {"TMPDIR": str(work)}, "timeout": 240}
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    assert "replicas agree: True" in done.stdout
    assert done.stdout.count("epoch 1/1") == 1
    found = json.loads((work / "out.json").read_text())
    assert found["config"]["world_size"] == 2
    assert len(found["bytes_sent"]) == 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"model": "my_wrk:make_model"}, "No module named 'my_wrk'"),
        ({"model": "broken:make_model"}, "ModuleNotFoundError: No module named 'no_such_thing'"),
        ({"model": "my_work:fails"}, "model fails() raised ZeroDivisionError: not today"),
        ({"dataset": "my_work:makes_3"}, "dataset is of type int, and labkit makes"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm' (did you mean 'adam'?)"),
    ],
)
def test_a_wrong_path_is_an_error_of_use_in_one_line(work, own, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", *WORDS, *words_of(**own)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
