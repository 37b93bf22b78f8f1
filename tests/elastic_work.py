"""What the tests under torchrun train: a small model, at a pace; its ranks say that they began."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from labkit import strategies

SAMPLES = 96


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_dataset():
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
    targets = (inputs.sum(dim=1) > 0).long() + (inputs[:, 1] > 1).long()
    return (inputs, targets), (inputs[:12], targets[:12])


def paced(step, folder, pace_s):
    def at_a_pace(strategy, *batch):
        time.sleep(pace_s * (not (folder / "hurry").exists()))
        return step(strategy, *batch)

    return at_a_pace


def told(setup, folder):
    def telling(strategy, comm, *parts):
        with open(folder / f"begun-{comm.rank}", "a") as file:
            print(comm.world_size, os.getpid(), file=file)
        return setup(strategy, comm, *parts)

    return telling


if "TESTS_PACE_S" in os.environ:
    _folder, _pace_s = Path(os.environ["TESTS_FOLDER"]), float(os.environ["TESTS_PACE_S"])
    _technique = strategies.get("ddp")
    _technique.step = paced(_technique.step, _folder, _pace_s)
    _technique.setup = told(_technique.setup, _folder)
