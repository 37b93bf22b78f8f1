"""Answers to exercises, and many of them graded in one run of ranks instead of one run each."""

import inspect
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from ranks import travel_by_value

import labkit
from workbook.check import Verdict
from workbook.exercises.grader import exercise, on_ranks

travel_by_value(__name__)

# Answers in one run: if one of them ends it after all, each of them gets its own run.
TOGETHER = 100
# Runs of several ranks at the same time.
AT_ONCE = 4


class Answers(NamedTuple):
    """Answers with which a check is tested, wrong ones on ``on`` ranks; ``ends`` marks some."""

    check: Callable[..., Verdict]
    right: list[Callable]
    wrong: list[Callable]
    on: int = 3

    def grade(self, fn: Callable, world_size: int | None = None) -> Verdict:
        chosen = {"world_sizes": (world_size,)} if self.sizes and world_size else {}
        return self.check(fn, **chosen)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The world sizes that the check tries; () if they cannot be chosen."""
        parameter = inspect.signature(self.check).parameters.get("world_sizes")
        return (parameter.default or self.check.world_sizes) if parameter else ()

    def sizes_of(self, fn: Callable) -> tuple[int | None, ...]:
        """The world sizes on which a right answer is graded: the answers take turns."""
        sizes = self.sizes or (None,)
        return sizes if len(self.right) < len(sizes) else in_turn(sizes, self.right.index(fn))

    def gradings(self) -> tuple[dict, dict]:
        """By (right answer, world size) and by wrong answer, what to grade.

        Those that may share a run, and those that end their run.
        """
        shared = {
            (fn, P): partial(self.grade, fn, P) for fn in self.right for P in self.sizes_of(fn)
        }
        wrong = {fn: partial(self.grade, fn, self.on) for fn in self.wrong}
        alone = {fn: wrong.pop(fn) for fn in self.wrong if fn in _ENDING}
        return shared | wrong, alone


_ENDING: list[Callable] = []


def ends(fn: Callable) -> Callable:
    """``fn``, marked as an answer that ends its run, by an error or a deadlock."""
    _ENDING.append(fn)
    return fn


def in_turn(sizes: tuple, number: int) -> tuple:
    """The world sizes of answer ``number``: one of ``sizes``, or all with LABKIT_EVERY_SIZE=1."""
    if os.environ.get("LABKIT_EVERY_SIZE") == "1":
        return sizes
    turn = number % len(sizes)
    return sizes[turn : turn + 1]


def graded(checks: Mapping[str, Answers]) -> dict[tuple, Verdict]:
    """The verdicts of all answers to these checks, by (name of the check, grading)."""
    shared, alone = {}, {}
    for name, answers in checks.items():
        for of_all, gradings in zip((shared, alone), answers.gradings()):
            of_all |= {(name, which): grading for which, grading in gradings.items()}
    with always_the_same_data():
        # A run that stands still, or is ended, mostly waits: some of them at the same time.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ended = {which: pool.submit(grading) for which, grading in alone.items()}
        verdicts = {which: verdict.result() for which, verdict in ended.items()}
        some = [*shared.items()]
        for first in range(0, len(some), TOGETHER):
            verdicts |= in_shared_runs(dict(some[first : first + TOGETHER]))
    return verdicts


class _Asked(BaseException):
    """Carries the run that a check asks for. Not an Exception, since a check reports those."""


def in_shared_runs(gradings: dict[Hashable, Callable[[], Verdict]]) -> dict[Hashable, Verdict]:
    """The verdicts of gradings that need at most one run; those of one world size share a run.

    If an answer raises or hangs, the shared run ends, and then each answer gets its own run.
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
        except labkit.WorkerError as error:
            # Runs of their own take minutes in all.
            warnings.warn(f"an answer is not marked with ends(): {error}", stacklevel=2)
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
    return mock.patch.object(exercise, "_SEEDS", 1)


def _ask(*args, **options):
    raise _Asked(args, options)


def _one_after_another(comm, calls):
    outcomes = []
    for attempt, *args in calls:
        outcomes.append(attempt(comm, *args))
        # A message that one answer has not received must not be received by the next.
        comm.barrier()
    return outcomes
