"""What is wrong with a training that ``check.elsewhere`` has run, and why.

Symbols: P ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workbook.exercises.elsewhere_training import (
    RIGHT,
    Batches,
    Setting,
    State,
    Ways,
    alike,
    deviating,
    momentum_of,
    played,
)
from workbook.exercises.grader import Mistake
from workbook.exercises.grader.compare import short

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
# A mistake's id, and what it changes in ``Ways``.
Deviations = Sequence[tuple[str, dict[str, Any]]]


def wrong_training(trainings: Trainings, deviations: Deviations) -> Mistake | None:
    """The first thing that is wrong; its reason is named if it explains all trainings."""
    if not trainings:
        return None
    found = _wrong_kind(trainings) or _every_rank_does_all(trainings)
    found = found or _wrong_states(trainings, deviations)
    return found or _wrong_losses(trainings) or _wrong_saves(trainings)


def _wrong_kind(trainings: Trainings) -> Mistake | None:
    for setting, ranks in trainings:
        for one in ranks:
            numbers = isinstance(one.losses, list) and [
                x for x in one.losses if isinstance(x, (int, float))
            ]
            if not numbers or not len(numbers) == len(one.losses) == setting.epochs:
                found = "nothing (None)" if one.losses is None else f"{short(one.losses):.60}"
                return Mistake("port.losses_kind", found=found, epochs=setting.epochs)
    return None


# Which samples a rank has trained on


def _every_rank_does_all(trainings: Trainings) -> Mistake | None:
    """All samples on each rank: wrong also where the result is right."""
    for setting, ranks in trainings:
        everything = {*range(len(setting.samples))}
        if len(ranks) == 1 or not all(
            {*part} == everything for one in ranks for part in _by_epoch(setting, one)
        ):
            return None
    setting, _ = trainings[0]
    return Mistake("port.reads_all", count=len(setting.samples), share=setting.share)


def _by_epoch(setting: Setting, one: Trained) -> list[list[int]]:
    """The samples of each epoch, in their order; none if they could not be told."""
    rows = [row for rows in one.seen for row in rows]
    if -1 in rows or len(rows) % setting.epochs:
        return [[] for _ in range(setting.epochs)]
    length = len(rows) // setting.epochs
    return [rows[e * length : (e + 1) * length] for e in range(setting.epochs)]


def _wrong_samples(trainings: Trainings) -> Mistake | None:
    """Which samples the ranks have trained on, if not on those of the script."""
    read = [[_by_epoch(setting, one) for one in ranks] for setting, ranks in trainings]
    if any(not part for of_ranks in read for epochs in of_ranks for part in epochs):
        return None
    settings = [setting for setting, _ in trainings]
    if all(map(_same_together, settings, read)):
        return _wrong_batch_size(trainings)

    def as_with(**sampling: Any) -> bool:
        return read == [_flat(setting.batches(**sampling)) for setting in settings]

    def first_epoch(setting: Setting) -> list[list[list[int]]]:
        return [epochs[:1] * setting.epochs for epochs in _flat(setting.batches())]

    P = len(trainings[0][1])
    if P > 1 and all(epochs == of_ranks[0] for of_ranks in read for epochs in of_ranks):
        return Mistake("port.same_share", share=len(read[0][0][0]))
    if read == [first_epoch(setting) for setting in settings]:
        return Mistake("port.set_epoch")
    if as_with(shuffle=False):
        return Mistake("port.in_order")
    full = [_flat(setting.batches(), setting.batch_size) for setting in settings]
    if as_with(drop_last=True) or read == full:
        return Mistake("port.dropped", share=settings[0].share, found=len(read[0][0][0]))
    return Mistake("port.other_samples")


def _flat(by_rank: list[Batches], least: int = 0) -> list[list[list[int]]]:
    """By rank and epoch: the samples, of batches with at least so many."""
    return [
        [[row for batch in batches if len(batch) >= least for row in batch] for batches in epochs]
        for epochs in by_rank
    ]


def _same_together(setting: Setting, read: list[list[list[int]]]) -> bool:
    """Whether in each batch all ranks together train on the right samples."""
    size = setting.batch_size

    def together(by_rank: list[list[list[int]]]) -> list[list[list[int]]]:
        starts = range(0, max(len(part) for epochs in by_rank for part in epochs), size)
        return [
            [sorted(row for part in parts for row in part[i : i + size]) for i in starts]
            for parts in zip(*by_rank)
        ]

    return together(read) == together(_flat(setting.batches()))


def _wrong_batch_size(trainings: Trainings) -> Mistake | None:
    sizes = [max(len(rows) for rows in ranks[0].seen) for _, ranks in trainings]
    due = [setting.batch_size for setting, _ in trainings]
    if all(found == size for found, size in zip(sizes, due)):
        return None
    place = next(i for i, found in enumerate(sizes) if found != due[i])
    return Mistake("port.batch_size", found=sizes[place], due=due[place])


# The replicas at the end


def _wrong_states(trainings: Trainings, deviations: Deviations) -> Mistake | None:
    def fits(ways: Ways) -> bool:
        return all(
            alike(one.state, replica.state)
            for setting, ranks in trainings
            for one, replica in zip(ranks, played(setting, ways))
        )

    if fits(RIGHT):
        return _last_bits(trainings)
    if samples := _wrong_samples(trainings):
        return samples
    reasons = [Mistake(id) for id in deviating(deviations, fits)]
    if reasons:
        reasons[0].also.extend(reasons[1:])
        return reasons[0]
    return Mistake("port.differs", _first_difference(trainings))


def _first_difference(trainings: Trainings) -> Mistake:
    for setting, ranks in trainings:
        start = "resumed" if setting.resumed else "fresh"
        for rank, (one, replica) in enumerate(zip(ranks, played(setting))):
            for name, due in replica.state.items():
                if not alike({name: one.state[name]}, {name: due}):
                    pair = [float(x.flatten()[0]) for x in (one.state[name], due)]
                    numbers = dict(zip(("found", "due"), (f"{x:.6g}" for x in pair)))
                    return Mistake(f"port.{start}_differs", rank=rank, name=name, **numbers)
    raise AssertionError("no difference")


def _last_bits(trainings: Trainings) -> Mistake | None:
    for _, ranks in trainings:
        for rank, one in enumerate(ranks):
            if any(not one.state[n].equal(value) for n, value in ranks[0].state.items()):
                return Mistake("port.last_bits", rank=rank)
    return None


# The losses, and what is saved


def _wrong_losses(trainings: Trainings) -> Mistake | None:
    def returned(rank: int, setting: Setting, way: Callable) -> list[float]:
        by_epoch = zip(*(replica.losses for replica in played(setting)))
        return [way(of_ranks, rank) for of_ranks in by_epoch]

    def fits(way: Callable) -> bool:
        return all(
            _close(one.losses, returned(rank, setting, way))
            for setting, ranks in trainings
            for rank, one in enumerate(ranks)
        )

    if fits(lambda losses, rank: sum(losses) / len(losses)):
        return None
    ways = {
        "port.losses_own": lambda losses, rank: losses[rank],
        "port.losses_of_first": lambda losses, rank: losses[0],
        "port.losses_sum": lambda losses, rank: sum(losses),
    }
    why = next((Mistake(id) for id, way in ways.items() if fits(way)), None)
    setting, ranks = trainings[0]
    due = returned(0, setting, lambda losses, rank: sum(losses) / len(losses))
    return why or Mistake("port.losses", found=short(ranks[0].losses), due=short(due))


def _close(found: list[float], due: list[float]) -> bool:
    return all(abs(x - y) <= _CLOSE * abs(y) for x, y in zip(found, due))


def _wrong_saves(trainings: Trainings) -> Mistake | None:
    for setting, ranks in trainings:
        savers = [rank for rank, one in enumerate(ranks) if one.saved]
        if len(savers) == len(ranks) > 1:
            return Mistake("port.saved_by_all", count=len(ranks))
        if savers != [0]:
            return Mistake("port.saved_by", ranks=", ".join(map(str, savers)) or "none")
        if wrong := _wrong_checkpoint(setting, ranks[0]):
            return wrong
    return None


def _wrong_checkpoint(setting: Setting, one: Trained) -> Mistake | None:
    saved = one.saved[-1]
    if not isinstance(saved, dict) or not {"model", "optimizer"} <= saved.keys():
        found = list(saved) if isinstance(saved, dict) else type(saved).__name__
        return Mistake("port.saved_kind", found=found)
    if [*saved["model"]] == [f"module.{name}" for name in one.state]:
        return Mistake("port.saved_prefix", name=next(iter(saved["model"])))
    if not alike(saved["model"], one.state):
        return Mistake("port.saved_model")
    if not _holds_momentum(saved["optimizer"], setting):
        return Mistake("port.saved_optimizer")
    return None


def _holds_momentum(state: Any, setting: Setting) -> bool:
    try:
        found = momentum_of(state)
    except (KeyError, TypeError, IndexError, AttributeError):
        return False
    due = played(setting)[0].momentum
    return alike(*({str(i): x for i, x in enumerate(both)} for both in (found, due)))
