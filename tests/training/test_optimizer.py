"""An optimizer advances its own learning rate with each update that it makes."""

import torch
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run, strategies
from labkit.training.resolve import optimizer_maker, schedule_of

SMALL = {"train_size": 23, "batch_size": 9, "epochs": 4, "model": "mlp", "dtype": "float64"}
SCHEDULED = SMALL | {"lr_schedule": "cosine", "warmup_epochs": 0.5}


def overflowing(comm, scales):
    """The number of updates after each step whose loss is multiplied by one of ``scales``."""
    strategy, found = strategies.get("single")(amp="fp16"), []
    factor = [1.0]
    strategy.loss = lambda outputs, targets: (
        factor[0] * functional.cross_entropy(outputs, targets, reduction="sum")
    )
    config = RunConfig(**SCHEDULED | {"dtype": "float32"})
    strategy.setup(comm, nn.Linear(6, 3), optimizer_maker(config, None, strategy, 23))
    inputs, targets = torch.ones(4, 6), torch.tensor([0, 1, 2, 0])
    for factor[0] in scales:
        strategy.step(inputs, targets, 4)
        found.append(schedule_of(strategy.optimizer).update)
    return found


def test_an_update_that_overflows_does_not_advance_the_schedule():
    scales = [1.0, 1e38, 1.0, float("inf"), 1.0]
    assert run(overflowing, scales, world_size=1).values == [[1, 1, 2, 2, 3]]
