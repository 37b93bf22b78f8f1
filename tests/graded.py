"""Answers to exercises, and many of them graded in one run of ranks instead of one run each."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from ranks import travel_by_value

import labkit
from labkit.check import Verdict
from labkit.check.grading import grader, on_ranks

travel_by_value(__name__)

ENDS_ITS_RUN = {
    *("run.stuck", "run.error", "run.second_call", "stub.raise_left", "stub.calls_stub"),
    *("answer.ended", "answer.endless"),
}


class Answers(NamedTuple):
    """Answers with which a check is tested.

    Attributes:
        check: the check, called with an answer (and ``world_sizes=``, if it takes them).
        right: answers that pass on each of its world sizes.
        wrong: tuples of an answer and what its verdict must contain: ids of mistakes, ``not``
            with an id that it must not contain, and words (with numbers) of the text.
        on: the world size on which the wrong answers are graded.
    """

    check: Callable[..., Verdict]
    right: list[Callable]
    wrong: list[tuple]
    on: int = 3

    def grade(self, fn: Callable, world_size: int | None = None) -> Verdict:
        options = {"world_sizes": (world_size,)} if self.sizes and world_size else {}
        with always_the_same_data():
            return self.check(fn, **options)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The world sizes that the check tries; () if they cannot be chosen."""
        parameter = inspect.signature(self.check).parameters.get("world_sizes")
        return parameter.default if parameter else ()

    def gradings(self) -> tuple[dict[Hashable, Callable], dict[Hashable, Callable]]:
        """Those that may share runs, and those that may not.

        They are by (right answer, world size) and by wrong answer.
        """
        found = {(fn, P): partial(self.grade, fn, P) for fn in self.right for P in self.sizes}
        found |= {(fn, None): partial(self.grade, fn) for fn in self.right if not self.sizes}
        together = [fn for fn, *ids in self.wrong if not ENDS_ITS_RUN & {*ids}]
        found |= {fn: partial(self.grade, fn, self.on) for fn in together}
        alone = {fn for fn, *_ in self.wrong} - {*together}
        return found, {fn: partial(self.grade, fn, self.on) for fn in alone}


class _Asked(BaseException):
    """Carries the run that a check asks for. Not an Exception, since a check reports those."""


def in_shared_runs(gradings: dict[Hashable, Callable[[], Verdict]]) -> dict[Hashable, Verdict]:
    """The verdicts of gradings that need at most one run; those of one world size share a run.

    In the shared run, the ranks execute one answer after another, each as in its own run. If an
    answer raises or hangs, the shared run ends, and then each answer gets its own run: grade such
    an answer separately.
    """
    by_size: dict[int, dict] = defaultdict(dict)
    verdicts = {}
    for name, grade in gradings.items():
        try:
            verdicts[name] = _with_run(grade, _ask)
        except _Asked as asked:
            call, options = asked.args
            by_size[options["world_size"]][name] = call
    for world_size, calls in by_size.items():
        try:
            by_rank = labkit.run(_one_after_another, list(calls.values()), world_size=world_size)
        except labkit.WorkerError:
            verdicts |= {name: gradings[name]() for name in calls}
            continue
        for name, outcomes in zip(calls, zip(*by_rank.values)):
            ran = SimpleNamespace(values=list(outcomes))
            # A check may make a second run, which is not shared.
            runs = chain([lambda *_, ran=ran, **__: ran], repeat(labkit.run))
            verdicts[name] = _with_run(
                gradings[name], lambda *args, runs=runs, **options: next(runs)(*args, **options)
            )
    return verdicts


def _with_run(grade: Callable[[], Verdict], run: Callable) -> Verdict:
    """Grade with ``run`` in place of ``labkit.run``."""
    with mock.patch.object(on_ranks, "run", run), always_the_same_data():
        return grade()


def always_the_same_data():
    """Let checks draw the same data each time."""
    return mock.patch.object(grader, "new_seed", return_value=1)


def _ask(*args, **options):
    raise _Asked(args, options)


def _one_after_another(comm, calls):
    outcomes = []
    for attempt, *args in calls:
        outcomes.append(attempt(comm, *args))
        # A message that one answer has not received must not be received by the next.
        comm.barrier()
    return outcomes
