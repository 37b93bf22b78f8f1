"""The factor of the learning rate equals PyTorch's own schedulers, update for update."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from labkit.schedules.learning_rate import lr_factor, parse_lr_schedule

EPOCHS, UPDATES = 6, 7


def factors(schedule, warmup_epochs=0.0, epochs=EPOCHS, updates_per_epoch=UPDATES):
    parsed = parse_lr_schedule(schedule)
    run = {"epochs": epochs, "updates_per_epoch": updates_per_epoch}
    count = epochs * updates_per_epoch
    return [
        lr_factor(k, schedule=parsed, warmup_epochs=warmup_epochs, **run) for k in range(count)
    ]


def pytorchs(schedule, warmup):
    """The rates of an optimizer whose base rate is 1, with ``warmup`` updates before."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    after = {
        "constant": lambda: LinearLR(optimizer, 1.0),
        "step:2:0.3": lambda: StepLR(optimizer, 2 * UPDATES, 0.3),
        "cosine": lambda: CosineAnnealingLR(optimizer, EPOCHS * UPDATES - warmup),
    }[schedule]
    scheduler = after()
    if warmup:
        optimizer.param_groups[0].update(lr=1.0, initial_lr=1.0)
        rising = LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
        scheduler = SequentialLR(optimizer, [rising, after()], [warmup])
    found = []
    for _ in range(EPOCHS * UPDATES):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7, 10])
@pytest.mark.parametrize("schedule", ["constant", "step:2:0.3", "cosine"])
def test_equals_pytorchs_schedulers(schedule, warmup):
    ours = factors(schedule, warmup_epochs=warmup / UPDATES)
    assert ours == pytest.approx(pytorchs(schedule, warmup), abs=1e-12)
