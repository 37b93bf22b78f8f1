"""The learning rate of an update: the run's rate, times a factor that depends on its number alone.

So every rank, stage and server knows it without a message, and a run that continues from a
checkpoint needs only the number of its next update. The rate first rises for ``warmup_epochs``,
then follows a schedule, which counts its updates from the end of the warm-up:

    constant           1
    step:EPOCHS:FACTOR FACTOR to the power of the number of EPOCHS that have passed
    cosine             (1 + cos(pi s / S)) / 2 for update s of S: from 1 to 0 at the end of the run

During a warm-up of w updates, update k (from 0) has the factor (k + 1) / (w + 1): equal rises, so
that update w is the first one with the whole rate.

Sources: Loshchilov and Hutter, "SGDR: Stochastic gradient descent with warm restarts" (2017),
equation 5 without restarts; Goyal et al., "Accurate, large minibatch SGD" (2017), sections 2.1
and 2.2, for the warm-up and the rate that grows with the batch.
"""

import math
from reprlib import repr as shortened
from typing import NamedTuple

from labkit import units


class LrSchedule(NamedTuple):
    """A schedule of a ``kind``: constant, cosine or step (times ``factor`` every ``epochs``)."""

    kind: str
    epochs: int = 1
    factor: float = 1.0


def parse_lr_schedule(text: str) -> LrSchedule:
    """Parse an option: ``"step:30:0.1"`` is ("step", 30, 0.1)."""
    kind, *numbers = str(text).split(":")
    if kind in ("constant", "cosine") and not numbers:
        return LrSchedule(kind)
    try:
        if kind != "step" or len(numbers) != 2:
            raise ValueError
        epochs = int(numbers[0])
        factor = float(numbers[1])
    except ValueError:
        raise ValueError(
            "lr_schedule must be constant, cosine, or step:EPOCHS:FACTOR as in step:30:0.1, got "
            f"{shortened(text)}"
        ) from None
    units.check_integer(f"lr_schedule {shortened(text)}: EPOCHS", epochs)
    units.check_above_zero(f"lr_schedule {shortened(text)}: FACTOR", factor, most=1)
    return LrSchedule(kind, epochs, factor)


def lr_factor(
    update: int, *, schedule: LrSchedule, warmup_epochs: float, epochs: int, updates_per_epoch: int
) -> float:
    """The factor of the learning rate for the update with this number, from 0.

    ``epochs`` are those of the whole run, with the ``warmup_epochs``, which may be a fraction.
    Beyond the end of the run, cosine stays at 0.
    """
    # 2.2 epochs of 25 updates are 55, not 55.00000000000001.
    warmup = round(warmup_epochs * updates_per_epoch, 9)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    since = update - warmup
    if schedule.kind == "step":
        return schedule.factor ** (since // (schedule.epochs * updates_per_epoch))
    if schedule.kind == "cosine":
        updates = epochs * updates_per_epoch - warmup
        if since >= updates:
            return 0.0
        return (1 + math.cos(math.pi * since / updates)) / 2
    return 1.0
