"""A learner's function on real ranks: the outcomes of its calls, or how the run broke off."""

import contextlib
import os
import random
import re
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from labkit.engine.comm.comm import Comm
from labkit.engine.errors import DeadlineError, WorkerError
from labkit.engine.runtime.launch import run
from workbook.exercises.grader.compare import plain
from workbook.exercises.grader.exercise import Case, Exercise, Outcome, Ranks, Wrong
from workbook.exercises.grader.watched import Watched

# A correct attempt takes milliseconds: these limits end endless loops, in the run of all cases and
# then in runs of one case each. After a deadlock the second runs get the longer limit, too: a
# busy machine may start its ranks late. One rank waits for none, so its first limit is its last.
TIMEOUT_S = 10.0
AGAIN_S = 3.0
ALONE_S = 6.0
# What a function may take on top of what its process holds; then it gets a MemoryError.
_MOST_BYTES = 2**30
# A note in the traceback of a rank that has raised.
_IN_CASE = "in the check's case "


class DidNotFinish(Exception):
    """A run that ended in an error: its story, without the traceback."""

    def __init__(self, error: WorkerError, case_text: str, case: Case):
        story = str(error).partition("\n\nTraceback of rank")[0]
        story = story.replace(", or give the run a larger timeout_s", "")
        # Of the check's own code the story knows only where its process began.
        story = story.replace("at <string>, line 1", "in the part that the check plays")
        if case.world_size == 1:
            story = story.replace("rank 0", "the function")
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if isinstance(error, DeadlineError) and load > 2 * cores:
            story += f"\nOr try again: the machine is busy (load {load:.0f} on {cores} cores)."
        story = f"{case_text}: {story}"
        if deed := re.search("all of them (send|receive) first", story):
            story = f"Deadlock: all {deed[1]} first, and none can go on.\n{story}"
        super().__init__(story)
        self.case = case


def outcomes_of(fn: Callable, exercise: Exercise, cases: list[Case]) -> dict[Case, Ranks]:
    """Return what ``fn`` left behind, by case, then by rank. All cases have one world size.

    Raises:
        DidNotFinish: a rank raised, left, or never ended.
    """

    def outcomes(cases: list[Case], timeout_s: float) -> dict[Case, Ranks]:
        options = {"world_size": cases[0].world_size, "device": "cpu", "timeout_s": timeout_s}
        by_rank = run(_attempt, fn, exercise.to_run(), cases, **options).values
        return dict(zip(cases, zip(*by_rank)))

    alone = cases[0].world_size == 1
    try:
        return outcomes(cases, ALONE_S if alone else TIMEOUT_S)
    except WorkerError as error:
        if alone and isinstance(error, DeadlineError):
            raise DidNotFinish(error, "in one of the calls", cases[0]) from None
        if raised_in := re.search(rf"^{_IN_CASE}(\d+)$", error.worker_traceback, re.MULTILINE):
            case = cases[int(raised_in[1])]
            raise DidNotFinish(error, exercise.where(case), case) from None
        failure = DidNotFinish(error, "in a call whose first of two went well", cases[0])
        again_s = AGAIN_S if isinstance(error, DeadlineError) else TIMEOUT_S
    # With one call per run, no rank is in the next case, or in the barrier before it, so the
    # explanation names only the learner's lines. Second calls have other data: they come last.
    for case in sorted(cases, key=lambda case: case.call):
        try:
            outcomes([case], again_s)
        except WorkerError as error:
            raise DidNotFinish(error, exercise.where(case), case) from None
    raise failure


def limit_memory() -> None:
    """Limit a rank's memory: an endless list ends in a MemoryError, and not the machine."""
    # Linux tells how much the process holds; other systems do not.
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _attempt(comm: Comm, fn: Callable, exercise: Exercise, cases: list[Case]) -> list[Outcome]:
    """Call ``fn`` on a rank for each case, the ranks together."""
    outcomes = []
    limit_memory()
    for number, case in enumerate(cases):
        if number:
            # A message that one call left unreceived must not be received by the next call.
            comm.barrier()
        draw_alike(case)
        args = exercise.inputs(comm.rank, case)
        try:
            outcomes.append(call_once(comm, fn, exercise, args))
        except Exception as error:
            error.add_note(f"{_IN_CASE}{number}")
            raise
    return outcomes


def draw_alike(case: Case) -> None:
    """Seed a rank: each trial of one case draws the same numbers, and torch.empty makes NaN."""
    torch.set_deterministic_debug_mode("warn")
    seed = hash(case)
    random.seed(seed)
    torch.manual_seed(seed)


def call_once(
    comm: Comm,
    fn: Callable,
    exercise: Exercise,
    args: tuple,
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> Outcome:
    """Call ``fn`` on a rank with ``exercise.inputs``; ``around`` as in ``Watched``."""

    written = None
    if exercise.written is not None:
        written = args[exercise.written]
    # The entries of a list are written, not the list.
    in_place = list(written) if isinstance(written, list) else written
    watched = Watched(fn, exercise.signature, written, exercise.keeps, around)
    messages = comm.messages
    num_bytes = comm.bytes_sent
    operations = comm.operations
    barriers = comm.session.barriers
    bytes_to = comm.bytes_to.copy()
    returned = exercise.call(watched, comm, *args)
    if exercise.written is None or isinstance(returned, Wrong):
        # Made plain here, because generators cannot travel, and run only now.
        value = plain(returned)
        stand_in = None
    else:
        value = in_place
        stand_in = written if isinstance(written, list) else returned
    return Outcome(
        value,
        stand_in,
        messages=comm.messages - messages,
        num_bytes=comm.bytes_sent - num_bytes,
        operations=comm.operations - operations,
        # Subtracting Counters keeps only the peers to which something was sent.
        bytes_to=comm.bytes_to - bytes_to,
        barriers=comm.session.barriers - barriers,
        steps=tuple(watched.steps),
        changed=watched.changed,
    )
