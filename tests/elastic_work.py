"""What the tests under torchrun train: a small model, whose steps say which samples they had."""

import os
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch import nn

from labkit import strategies

SAMPLES = 96


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_dataset():
    """The first feature of a sample tells its number."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
    inputs[:, 0] = torch.arange(SAMPLES, dtype=torch.float64) / SAMPLES
    targets = (inputs.sum(dim=1) > 0).long() + (inputs[:, 1] > 1).long()
    return (inputs, targets), (inputs[:12], targets[:12])


def _told(step, folder, pace_s):
    def telling(strategy, inputs, targets, batch_size):
        numbers = [round(float(x) * SAMPLES) for x in inputs.flatten(1)[:, 0]]
        with open(folder / str(os.getpid()), "a") as file:
            print(*numbers, file=file)
        time.sleep(pace_s * (not (folder.parent / "hurry").exists()))
        return step(strategy, inputs, targets, batch_size)

    return telling


def _begun(setup, folder):
    def telling(strategy, comm, *parts):
        with open(folder.parent / f"begun-{comm.rank}", "a") as file:
            print(comm.world_size, os.getpid(), file=file)
        return setup(strategy, comm, *parts)

    return telling


if "LABKIT_STEPS" in os.environ:
    if "torch._dynamo" not in sys.modules:
        # To import it takes seconds, and no optimizer needs it.
        torch._dynamo = sys.modules["torch._dynamo"] = MagicMock(disable=lambda one, *_, **__: one)
    _pace_s = float(os.environ["LABKIT_PACE_S"])
    for _name in ("ddp", "ring_all_reduce"):
        _technique = strategies.get(_name)
        _folder = Path(os.environ["LABKIT_STEPS"])
        _technique.step = _told(_technique.step, _folder, _pace_s)
        _technique.setup = _begun(_technique.setup, _folder)
