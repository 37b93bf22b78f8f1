"""A learner's function on real ranks: what each call left behind, or how the run broke off."""

import contextlib
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.comm.comm import Comm
from labkit.errors import DeadlineError, DeadlockError, WorkerError
from labkit.runtime.launch import run
from workbook.exercises.grader.compare import plain
from workbook.exercises.grader.exercise import Case, Exercise, Outcome, Ranks, Wrong
from workbook.exercises.grader.stub import STUB
from workbook.exercises.grader.watched import Watched

# A correct attempt takes milliseconds: these limits end endless loops, in the run of all cases and
# then in runs of one case each. After an error that is not a timeout, the second runs get the
# longer limit, too: a busy machine may start its ranks late.
TIMEOUT_S = 10.0
AGAIN_S = 3.0
# What a function may take on top of what its process holds; then it gets a MemoryError.
_MOST_BYTES = 2**30


class DidNotFinish(Exception):
    """A run that ended in an error: its ``ending``, ``stuck`` or ``error``, and the story.

    Attributes:
        unwritten: the function whose stub a rank came to; "" if none.
        tried: the outcomes of the cases that went well before.
    """

    def __init__(self, error: Exception, place: str = ""):
        self.ending = "stuck" if isinstance(error, DeadlockError) else "error"
        traceback = getattr(error, "worker_traceback", "")
        # In a traceback, code is indented by four spaces, places by two, the error by none.
        last_frame = re.split(r"\n(?=  \S)", f"\n{traceback}")[-1]
        unwritten = rf"  .*, in (\S+)\n    .*{STUB}\b(?s:.*)\nNotImplementedError\b"
        found = re.match(unwritten, last_frame)
        self.unwritten = found[1] if found else ""
        self.tried: dict[Case, Ranks] = {}
        super().__init__(f"{place}: {story_of(error)}" if place else story_of(error))


def story_of(error: Exception) -> str:
    """An error's words, without the traceback and without advice on ``labkit.run``."""
    story = str(error).partition("\n\nTraceback of rank")[0]
    return story.replace(", or give the run a larger timeout_s", "")


def outcomes_of(fn: Callable, exercise: Exercise, cases: list[Case]) -> dict[Case, Ranks]:
    """Return what ``fn`` left behind, by case, then by rank. All cases have one world size.

    Raises:
        DidNotFinish: a rank raised, left, or never ended.
    """
    try:
        return _run(fn, exercise, cases, TIMEOUT_S)
    except WorkerError as error:
        failure = DidNotFinish(error)
        if failure.unwritten:
            raise failure from None
        again_s = AGAIN_S if isinstance(error, DeadlineError) else TIMEOUT_S
    # Find the case that failed. With one call per run, no rank is in the next case, or in the
    # barrier before it, so the explanation names only the learner's lines.
    tried: dict[Case, Ranks] = {}
    for case in cases:
        if case.call:
            continue
        try:
            tried |= _run(fn, exercise, [case], again_s)
        except WorkerError as error:
            failure = DidNotFinish(error, exercise.where(case))
            break
    else:
        failure.args = (
            f"{failure}. The first call of every case went well: this was a later one",
        )
    failure.tried = tried
    raise failure


def in_one_process(fn: Callable, *args: Any, timeout_s: float) -> Any:
    """Return ``fn(comm, *args)`` of a run with one rank."""
    return run(fn, *args, world_size=1, device="cpu", timeout_s=timeout_s).values[0]


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """In a rank: an endless list ends in a MemoryError, and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Linux tells how much the process holds; other systems do not.
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _run(
    fn: Callable, exercise: Exercise, cases: list[Case], timeout_s: float
) -> dict[Case, Ranks]:
    options = {"world_size": cases[0].world_size, "device": "cpu", "timeout_s": timeout_s}
    by_rank = run(_attempt, fn, exercise.to_run(), cases, **options).values
    return dict(zip(cases, zip(*by_rank)))


def _attempt(comm: Comm, fn: Callable, exercise: Exercise, cases: list[Case]) -> list[Outcome]:
    """On a rank: call ``fn`` for each case, the ranks together."""
    outcomes = []
    with limited_memory():
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
    before_it = list(given) if isinstance(given, list) else given
    watched = Watched(fn, exercise.signature, exercise.may_call, written=given)
    before, sent_before = _spent(comm), comm.bytes_to.copy()
    returned = exercise.call(watched, comm, *args)
    value, meant = (before_it, given) if isinstance(given, list) else (given, returned)
    if exercise.written is None or isinstance(returned, Wrong):
        # Made plain here, because generators cannot travel, and run only now.
        value, meant = plain(returned), None
    messages, num_bytes, operations, barriers = (
        now - then for now, then in zip(_spent(comm), before)
    )
    # Subtracting Counters keeps only the peers to which something was sent.
    sent_to = comm.bytes_to - sent_before
    seen = barriers, tuple(watched.steps), watched.library, watched.changed
    return Outcome(value, meant, messages, num_bytes, operations, sent_to, *seen)


def _spent(comm: Comm) -> tuple[int, int, int, int]:
    return comm.messages, comm.bytes_sent, comm.operations, comm.session.barriers
