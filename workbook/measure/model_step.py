"""A training step to be timed: the same model on the same batch, whatever strategy trains it."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from labkit.comm.comm import Comm
from labkit.strategies.base import Strategy
from labkit.workload.models import build_model

SHAPE, NUM_CLASSES = (3, 32, 32), 10
LEARNING_RATE = 1e-3


def build(name: str) -> nn.Sequential:
    """One of ``labkit.workload.models`` for images of 3x32x32, the same on every rank."""
    return build_model(name, num_classes=NUM_CLASSES, input_shape=SHAPE, seed=0)


class ModelStep:
    """A model, the same on every rank, and a batch of random samples, the same by seed."""

    def __init__(self, model: str, batch_size: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.model = build(model)
        self.samples = torch.randn(batch_size, *SHAPE, generator=generator)
        self.classes = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)

    def of(self, strategy: Strategy, comm: Comm) -> Callable[[], object]:
        """Set ``strategy`` up with a copy of the model, and return its step."""
        optimizer = partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)
        strategy.setup(comm, copy.deepcopy(self.model), optimizer)
        samples, classes = self.samples.to(comm.device), self.classes.to(comm.device)
        return partial(strategy.step, samples, classes, len(classes))
