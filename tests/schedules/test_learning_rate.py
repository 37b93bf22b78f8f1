"""The factor of the learning rate equals PyTorch's own schedulers, update for update."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from labkit.schedules.learning_rate import LrSchedule, lr_factor, parse_lr_schedule

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


@pytest.mark.parametrize("warmup_epochs", [0.1, 0.5, 1, 1.05, 2.9])
def test_a_warm_up_rises_equally_and_may_end_within_an_epoch(warmup_epochs):
    found = factors("constant", warmup_epochs, epochs=3, updates_per_epoch=30)
    warmup = warmup_epochs * 30
    rising = [factor for factor in found if factor < 1]
    assert len(rising) == math.ceil(warmup - 1e-6)
    assert rising == pytest.approx([(k + 1) / (warmup + 1) for k in range(len(rising))])


def test_a_step_is_counted_from_the_end_of_the_warm_up_to_the_very_update():
    # 2.2 * 25 is a little more than 55.
    found = factors("step:1:0.001", warmup_epochs=2.2, epochs=5, updates_per_epoch=25)
    assert [found.index(0.001**power) for power in range(3)] == [55, 80, 105]


def test_a_few_updates_more_of_an_asynchronous_run_have_the_rate_0():
    run = {"warmup_epochs": 0, "epochs": EPOCHS, "updates_per_epoch": UPDATES}
    assert lr_factor(EPOCHS * UPDATES + 2, schedule=LrSchedule("cosine"), **run) == 0.0


def test_texts():
    assert parse_lr_schedule("cosine") == ("cosine", 1, 1)
    assert parse_lr_schedule("step:30:1e-1") == ("step", 30, 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text, "must be constant, cosine, or step:EPOCHS:FACTOR as in step:30:0.1, got ")
        for text in ("linear", "step:30", "step:3:0.1:2", "cosine:3", "step:1.5:0.1")
    ]
    + [
        ("step:0:0.1", "EPOCHS must be an integer from 1 up, got 0"),
        ("step:1:0", "FACTOR must be a number above 0, got 0.0"),
        ("step:1:1.5", "FACTOR must be at most 1, got 1.5"),
    ],
)
def test_texts_that_are_no_schedule(text, message):
    with pytest.raises(ValueError, match=message):
        parse_lr_schedule(text)
