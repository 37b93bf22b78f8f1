"""Many answers graded in one run of ranks, where each would be a run of its own."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from unittest import mock

from ranks import travel_by_value

import labkit
from labkit.check import Verdict
from labkit.check.grading import runs

travel_by_value(__name__)


def default_sizes(checker: Callable[..., Verdict]) -> tuple[int, ...]:
    """The world sizes that a check tries."""
    return inspect.signature(checker).parameters["world_sizes"].default


class _Asked(BaseException):
    """What a check wants to have run. No Exception: those a check would tell of."""


def in_shared_runs(gradings: dict[Hashable, Callable[[], Verdict]]) -> dict[Hashable, Verdict]:
    """The verdicts of gradings that take one run each; those of one world size share one.

    On the ranks each answer meets what it meets in a run of its own, one answer after the other.
    One that raises or stands still ends its run, and then each gets its own: grade it by itself.
    """
    by_size = defaultdict(dict)
    for name, grade in gradings.items():
        call, options = _asked_by(grade)
        by_size[options["world_size"]][name] = call
    verdicts = {}
    for world_size, calls in by_size.items():
        try:
            by_rank = labkit.run(_one_after_another, list(calls.values()), world_size=world_size)
        except labkit.WorkerError:
            verdicts |= {name: gradings[name]() for name in calls}
            continue
        for name, outcomes in zip(calls, zip(*by_rank.values)):
            verdicts[name] = _with_run(gradings[name], mock.Mock(return_value=_ran(outcomes)))
    return verdicts


def _with_run(grade: Callable[[], Verdict], run: Callable) -> Verdict:
    """Grade with ``run`` in the place of ``labkit.run``."""
    with mock.patch.object(runs, "run", run):
        return grade()


def _ran(values: tuple) -> SimpleNamespace:
    return SimpleNamespace(values=list(values))


def _asked_by(grade: Callable[[], Verdict]) -> tuple[tuple, dict]:
    def ask(*args, **options):
        raise _Asked(args, options)

    try:
        _with_run(grade, ask)
    except _Asked as asked:
        return asked.args
    raise ValueError(f"{grade} takes no run: grade it by itself")


def _one_after_another(comm, calls):
    outcomes = []
    for attempt, *args in calls:
        outcomes.append(attempt(comm, *args))
        # What one answer left unreceived must not be taken for a message of the next.
        comm.barrier()
    return outcomes
