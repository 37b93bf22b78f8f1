"""A learner's function on real ranks: what each call left behind, or how the run broke off."""

import re
from collections.abc import Callable

from labkit.check.grading.exercise import Case, Exercise, Outcome, where
from labkit.check.grading.report import STUB
from labkit.check.grading.words import Mistake
from labkit.comm.comm import Comm
from labkit.errors import DeadlineError, DeadlockError, WorkerError
from labkit.runtime.launch import run

# A correct attempt takes milliseconds: these limits end endless loops, in the run of all cases and
# then in runs of one case each. After an error that is not a timeout, the second runs get the
# longer limit, too: a busy machine may start its ranks late.
TIMEOUT_S = 10.0
AGAIN_S = 3.0


class DidNotFinish(Exception):
    """A run that ended in an error: its ``ending``, ``stuck`` or ``error``, and its mistake."""

    def __init__(self, error: Exception, place: str = ""):
        self.ending = "stuck" if isinstance(error, DeadlockError) else "error"
        traceback = getattr(error, "worker_traceback", "")
        # In a traceback, code is indented by four spaces, places by two, the error by none.
        last_frame = re.split(r"\n(?=  \S)", f"\n{traceback}")[-1]
        unwritten = rf"  .*\n    .*{STUB}\b(?s:.*)\nNotImplementedError\b"
        self.not_attempted = re.match(unwritten, last_frame) is not None
        story = str(error).partition("\n\nTraceback of rank")[0]
        super().__init__(f"{place}: {story}" if place else story)
        self.mistake = Mistake(f"run.{self.ending}", story=str(self))


def outcomes_of(fn: Callable, exercise: Exercise, cases: list[Case]) -> list[tuple[Outcome, ...]]:
    """Return what ``fn`` left behind, by case, then by rank. All cases have one world size.

    Raises:
        DidNotFinish: a rank raised, left, or never ended.
    """
    try:
        return _run(fn, exercise, cases, TIMEOUT_S)
    except WorkerError as error:
        failure = DidNotFinish(error)
        if failure.not_attempted:
            raise failure from None
        again_s = AGAIN_S if isinstance(error, DeadlineError) else TIMEOUT_S
    # Find the case that failed. With one case per run, no rank is in the next case, or in the
    # barrier before it, so the explanation names only the learner's lines.
    for case in cases:
        try:
            _run(fn, exercise, [case], again_s)
        except WorkerError as error:
            raise DidNotFinish(error, where(case, exercise)) from None
    raise failure


def _run(
    fn: Callable, exercise: Exercise, cases: list[Case], timeout_s: float
) -> list[tuple[Outcome, ...]]:
    options = {"world_size": cases[0].world_size, "device": "cpu", "timeout_s": timeout_s}
    return list(zip(*run(_attempt, fn, exercise.to_run(), cases, **options).values))


def _attempt(comm: Comm, fn: Callable, exercise: Exercise, cases: list[Case]) -> list[Outcome]:
    """On a rank: call ``fn`` for each case, the ranks together."""
    outcomes = []
    for number, case in enumerate(cases):
        if number:
            # A message that one call left unreceived must not be received by the next call.
            comm.barrier()
        outcomes.append(call_once(comm, fn, exercise, case))
    return outcomes


def call_once(comm: Comm, fn: Callable, exercise: Exercise, case: Case) -> Outcome:
    """On a rank: call ``fn`` for one case."""
    args = exercise.inputs(comm.rank, case)
    given = None if exercise.written is None else args[exercise.written]
    kept = list(given) if isinstance(given, list) else given
    before, sent_before = _spent(comm), comm.bytes_to.copy()
    returned = exercise.call(fn, comm, *args)
    value, meant = (kept, given) if isinstance(given, list) else (given, returned)
    if exercise.written is None or isinstance(returned, Mistake):
        value, meant = returned, None
    messages, num_bytes, operations = (now - then for now, then in zip(_spent(comm), before))
    # Subtracting Counters keeps only the peers to which something was sent.
    return Outcome(value, meant, messages, num_bytes, operations, comm.bytes_to - sent_before)


def _spent(comm: Comm) -> tuple[int, int, int]:
    return comm.messages, comm.bytes_sent, comm.operations
