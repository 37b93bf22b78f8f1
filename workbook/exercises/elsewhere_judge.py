"""What is wrong with a training that ``check.elsewhere`` has run.

Symbols: P ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbook.exercises.elsewhere_training import (
    RIGHT,
    Setting,
    State,
    Ways,
    alike,
    momentum_of,
    played,
)
from workbook.exercises.grader.compare import short
from workbook.exercises.grader.exercise import Found

# The loss of an epoch travels in float32.
_CLOSE = 1e-5


@dataclass(frozen=True)
class Trained:
    """What a training has left on a rank. (No tuple: a check makes lists of those.)

    Attributes:
        state: of the model.
        losses: what the function returned.
        saved: what it has saved, in this order.
        seen: the samples of each forward with gradients; -1 for one that is not of the data set.
    """

    state: State
    losses: Any
    saved: list[dict[str, Any]]
    seen: list[list[int]]


# By training, then by rank.
Trainings = Sequence[tuple[Setting, Sequence[Trained]]]


def wrong_training(trainings: Trainings, mistakes: Mapping[str, Ways]) -> Found:
    """The first thing that is wrong. ``mistakes``: a sentence -> how such a training goes."""
    for setting, ranks in trainings:
        for rank, one in enumerate(ranks):
            found = one.losses if isinstance(one.losses, list) else []
            numbers = [loss for loss in found if isinstance(loss, int | float)]
            if not len(numbers) == len(found) == setting.epochs:
                text = f"rank {rank} returned {short(one.losses)}: return a list of numbers, the "
                return f"{text}mean loss of each of the {setting.epochs} epochs"
    if found := _wrong_samples(trainings) or _wrong_states(trainings, mistakes):
        return found
    for setting, ranks in trainings:
        own = [replica.losses for replica in played(setting)]
        expected = [sum(losses) / len(losses) for losses in zip(*own)]
        for rank, one in enumerate(ranks):
            if not all(abs(x - y) <= _CLOSE * abs(y) for x, y in zip(one.losses, expected)):
                text = (
                    f"the model is right, but rank {rank} returned the losses {short(one.losses)}"
                )
                return f"{text}, expected the average over the ranks, {short(expected)}"
        savers = [rank for rank, one in enumerate(ranks) if one.saved]
        if savers != [0]:
            text = f"the checkpoint is saved by the ranks {savers}, expected rank 0 alone"
            return f"{text}: on one disk they would write the same file at the same time"
        if wrong := _wrong_checkpoint(setting, ranks[0]):
            return wrong
    return None


def _by_epoch(setting: Setting, one: Trained) -> list[list[int]]:
    """The samples of each epoch, in their order; none if they could not be told."""
    rows = [row for rows in one.seen for row in rows]
    if -1 in rows or len(rows) % setting.epochs:
        return []
    length = len(rows) // setting.epochs
    return [rows[e * length : (e + 1) * length] for e in range(setting.epochs)]


def _wrong_samples(trainings: Trainings) -> Found:
    """All samples on each rank, which is wrong also where the result is right."""
    for setting, ranks in trainings:
        everything = {*range(len(setting.samples))}
        epochs = [part for one in ranks for part in _by_epoch(setting, one)]
        if len(ranks) == 1 or not epochs or any({*part} != everything for part in epochs):
            return None
    setting, _ = trainings[0]
    text = f"every rank trains on all {len(setting.samples)} samples in every epoch, though its "
    return f"{text}share is {setting.share}"


def _wrong_states(trainings: Trainings, mistakes: Mapping[str, Ways]) -> Found:
    def first_other(ways: Ways) -> Found:
        """Where the models differ from those of a training that goes this way."""
        for setting, ranks in trainings:
            start = "from a checkpoint" if setting.resumed else "from the beginning"
            for rank, (one, replica) in enumerate(zip(ranks, played(setting, ways))):
                for name, value in replica.state.items():
                    if not alike({name: one.state[name]}, {name: value}):
                        pair = [float(x.flatten()[0]) for x in (one.state[name], value)]
                        text = f"{start}, rank {rank} ends with {name} = {pair[0]:.6g}, ..., and "
                        return f"{text}one device that plays all ranks with {pair[1]:.6g}, ..."
        return None

    if wrong := first_other(RIGHT):
        for setting, ranks in trainings:
            read = [_by_epoch(setting, one) for one in ranks]
            script = [
                [[row for batch in epoch for row in batch] for epoch in epochs]
                for epochs in setting.batches()
            ]
            largest = max(len(rows) for one in ranks for rows in one.seen)
            if largest != setting.batch_size:
                text = f"a batch has {largest} samples on a rank, and {setting.batch_size} in the "
                return f"{text}script"
            for rank, (own, due) in enumerate(zip(read, script)):
                for epoch, (found, expected) in enumerate(zip(own, due)):
                    if sorted(found) != sorted(expected) and not _same_together(setting, ranks):
                        text = f"in epoch {epoch} rank {rank} trains on the samples {short(found)}"
                        return f"{text}, and in the script on {short(expected)}"
        for sentence, ways in mistakes.items():
            if first_other(ways) is None:
                return sentence
        return wrong
    for _, ranks in trainings:
        for rank, one in enumerate(ranks):
            if any(not one.state[n].equal(value) for n, value in ranks[0].state.items()):
                return f"ranks 0 and {rank} differ in the last bits, so replicas drift apart"
    return None


def _same_together(setting: Setting, ranks: Sequence[Trained]) -> bool:
    """Whether in each batch all ranks together train on the samples of the script."""

    def together(by_rank: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        return [sorted(row for rows in parts for row in rows) for parts in zip(*by_rank)]

    script = [[batch for epoch in epochs for batch in epoch] for epochs in setting.batches()]
    return together([one.seen for one in ranks]) == together(script)


def _wrong_checkpoint(setting: Setting, one: Trained) -> Found:
    saved = one.saved[-1]
    if not isinstance(saved, dict) or not {"model", "optimizer"} <= saved.keys():
        found = list(saved) if isinstance(saved, dict) else type(saved).__name__
        return f"what is saved holds {found}, expected {{'model': ..., 'optimizer': ...}}"
    if not alike(saved["model"], one.state):
        names = list(saved["model"])[:1]
        return f"what is saved as the model (with names like {names}) is not the model at the end"
    try:
        found = momentum_of(saved["optimizer"])
    except (KeyError, TypeError, IndexError, AttributeError):
        found = []
    both = found, played(setting)[0].momentum
    if not alike(*({str(i): x for i, x in enumerate(one)} for one in both)):
        return "what is saved as the optimizer does not hold the momentum at the end"
    return None
