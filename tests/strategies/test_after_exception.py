"""An exception in backward that the caller catches: the next steps are those of one device."""

import contextlib

import pytest
import torch
from odd_models import seeded, sgd, some_batches
from ranks import travel_by_value
from torch import nn

from labkit import WorkerError, run, strategies
from labkit.strategies.ddp import NaiveDDP
from labkit.training.result import largest_difference

travel_by_value(__name__)

TECHNIQUES = {
    "ddp": {"bucket_mb": 0},
    "ring_all_reduce": {},
    "sharded": {"stage": 1},
    "sharded in stage 2": {"stage": 2},
    "sharded in stage 3": {"stage": 3},
}


class Fragile(nn.Module):
    """An identity whose backward raises ``fails`` backwards from now."""

    def __init__(self):
        super().__init__()
        self.fails = 0

    def forward(self, inputs):
        outputs = inputs.view_as(inputs)
        outputs.register_hook(self.in_backward)
        return outputs

    def in_backward(self, gradient):
        self.fails -= 1
        if self.fails == 0:
            raise RuntimeError("out of memory")


def fragile():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Fragile(), nn.Linear(8, 8), nn.Linear(8, 6))


def with_failures(comm, name, options):
    """The state after three steps; before the second and the third one fails on every rank."""
    strategy = strategies.get(name.split()[0])(accumulate=2, **options)
    model = seeded(fragile)
    strategy.setup(comm, model, sgd)
    for number, (inputs, targets) in enumerate(some_batches((8, 8, 8))):
        inputs, targets = strategy.part_of(inputs), strategy.part_of(targets)
        if number:
            model[2].fails = number  # in the first micro-batch, then in the second
            with pytest.raises(RuntimeError, match="out of memory"):
                strategy.step(inputs, targets, 8)
        strategy.step(inputs, targets, 8)
    return strategy.full_state()


def test_the_next_step_equals_one_device_in_every_technique():
    (due,) = run(with_failures, "single", {}, world_size=1).values
    for name, options in TECHNIQUES.items():
        for state in run(with_failures, name, options, world_size=2).values:
            assert largest_difference(state, due) < 1e-10, name


def gradients_of_naive_ddp(comm):
    replica = NaiveDDP(comm, seeded(fragile))
    inputs = torch.ones(2, 6, dtype=torch.float64) + comm.rank
    replica.module[2].fails = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        replica(inputs).sum().backward()
    replica.zero_grad()
    replica(inputs).sum().backward()
    return {name: p.grad for name, p in replica.module.named_parameters()}


def test_naive_ddp_synchronizes_again():
    gradients, others = run(gradients_of_naive_ddp, world_size=2).values
    assert largest_difference(gradients, others) == 0


def pipeline_goes_on(comm):
    strategy = strategies.get("pipeline")((2,), 2)
    model = seeded(fragile)
    strategy.setup(comm, model, sgd)
    model[2].fails = 1
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            strategy.step(*some_batches((8,))[0], 8)


def test_a_pipeline_whose_messages_are_under_way_does_not_go_on():
    with pytest.raises(WorkerError, match="Begin a new run"):
        run(pipeline_goes_on, world_size=2)
