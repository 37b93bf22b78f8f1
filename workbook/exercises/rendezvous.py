"""Page 12: processes that get their ranks, and learn of each other, from a store.

The processes and the store are real, and three attempts are made on one store, since a store
outlives the attempt that failed. In the first, all processes go step by step together, so that a
rank that is read and written back in two steps is taken twice. In the second, one process comes
and dies after its first entry. In the third, they come one after another.

Symbols: P processes.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.errors import WorkerError
from labkit.runtime.launch import run
from labkit.runtime.output import undrawn
from labkit.tracing import Span, Trace
from workbook.exercises.grader import WORLD_SIZES, Case, Verdict, returns
from workbook.exercises.grader.compare import short
from workbook.exercises.grader.exercise import Found
from workbook.exercises.grader.own_run import OwnRun
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET
from workbook.exercises.shared_store import Died, SharedStore, Visit, visit

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure

TOGETHER, ONE_DIES, IN_TURN = ATTEMPTS = range(3)
# So many operations of each process are made step by step, and each waits so long at most.
_STEPS, _STEP_S = 6, 0.3
# A process comes when those before it wait or have ended, but after this time at the latest.
_TURN_S = 2.0
_POLL_S = 0.001
# Drawn: each process comes this much after the one before, so that the figure shows who waits.
_LATER_S, _TIMEOUT_S = 0.05, 10.0

_calls = itertools.count()


def meet(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(store, address, world_size, attempt)``: returns (rank, addresses by rank).

    Every process has an address and the same store, a ``torch.distributed`` store. Any order of
    ranks is right, if every process finds the same one.
    """
    verdict = returns(
        fn,
        name="rendezvous.meet",
        signature="store, address, world_size, attempt",
        inputs=lambda rank, case: (case,),
        call=_meet,
        judge=_judge,
        nouns=("process", ""),
        world_sizes=world_sizes,
    )
    verdict.run_again = partial(own_run, verdict.name, fn)
    return verdict


class _Meeting:
    """One process's part in a meeting that the check arranges, by notes in a store of its own."""

    def __init__(self, notes: dist.Store, place: int, world_size: int):
        self._notes, self._place = notes, place
        self._others = [other for other in range(world_size) if other != place]

    def store(self, real: dist.Store, attempt: int) -> SharedStore:
        """The store for the learner's function; waits for this process's turn."""
        settle = partial(self._note, f"{attempt}/settled/{self._place}")
        if attempt == TOGETHER:
            return SharedStore(real, self._in_step, settle)
        before = [other for other in self._others if other < self._place]
        self._until([[f"{attempt}/settled/{other}"] for other in before], _TURN_S)
        return SharedStore(real, before_wait=settle)

    def end(self, attempt: int) -> None:
        """Wait until every process has ended this attempt."""
        self._note(f"{attempt}/settled/{self._place}")
        self._note(f"{attempt}/ended/{self._place}")
        self._notes.wait([f"{attempt}/ended/{other}" for other in self._others])

    def _in_step(self, number: int) -> None:
        """Wait until every other process has come as far, waits for a key, or has ended."""
        if number > _STEPS:
            return
        self._note(f"{TOGETHER}/{number}/{self._place}")
        groups = [[f"{TOGETHER}/{what}/{o}" for what in (number, "settled")] for o in self._others]
        self._until(groups, _STEP_S)

    def _until(self, groups: list[list[str]], limit_s: float) -> None:
        """Wait until one key of each group is set; not forever, since a process may just sleep."""
        deadline_s = time.monotonic() + limit_s
        while groups and time.monotonic() < deadline_s:
            groups = [keys for keys in groups if not any(self._notes.check([k]) for k in keys)]
            time.sleep(_POLL_S)

    def _note(self, key: str) -> None:
        self._notes.set(key, "1")


def _meet(fn: Callable, comm: Comm, case: Case) -> list[Visit]:
    """On a process: the first and the last attempt; no further one if somebody waited in vain."""
    shared = dist.PrefixStore(f"check/{next(_calls)}", dist.distributed_c10d._get_default_store())
    notes, real = dist.PrefixStore("notes", shared), dist.PrefixStore("store", shared)
    # Neither the numbers of the check's own ranks nor their order have a meaning.
    place = (case.integer(0, 1, 7) + comm.rank) % case.world_size
    meeting, visits = _Meeting(notes, place, case.world_size), []
    for attempt in ATTEMPTS:
        address = _address(comm.rank, attempt, case)
        if attempt != ONE_DIES:
            store = meeting.store(real, attempt)
            visits.append(visit(fn, store, address, case.world_size, attempt))
        elif place == 0:
            # Alone, it fails in one way or another.
            with contextlib.suppress(Died, Exception):
                visit(fn, SharedStore(real, _die), address, case.world_size, attempt)
        if visits[-1].waited_for:
            notes.set("in vain", "1")
        meeting.end(attempt)
        if notes.check(["in vain"]):
            break
    return visits


def _die(number: int) -> None:
    raise Died


def _address(rank: int, attempt: int, case: Case) -> str:
    """The address of a process, another one in each attempt."""
    key = 100 * attempt + rank
    host, port = case.integer(key, 2, 250), case.integer(1000 + key, 20_000, 60_000)
    return f"10.0.{10 * attempt + rank}.{host}:{port}"


def _judge(case: Case, values: list[Any]) -> Found:
    """What is wrong in the first attempt that went wrong. ``values``: the visits by process."""
    former = {_address(r, one, case) for r in range(case.world_size) for one in ATTEMPTS[:-1]}
    for attempt, visits in zip((TOGETHER, IN_TURN), zip(*values)):
        if found := _wrong_meeting(visits, former if attempt else set()):
            later = "in a later attempt, with a store that holds the keys of those before: "
            return later + found if attempt else found
    return None


def _wrong_meeting(visits: Sequence[Visit], former: set[str]) -> Found:
    P, known = len(visits), {one.address for one in visits}
    race = _race(visits)
    for one in visits:
        if one.waited_for:
            keys = sorted({use.key for v in visits for use in v.uses if use.op in ("set", "add")})
            text = f"the process at {one.address} waits for {one.waited_for}, which nobody sets"
            return race or f"{text}; what was set: {', '.join(keys) or 'none'}"
        match one.result:
            case [int(rank), [*addresses]] if not isinstance(rank, bool):
                if not all(isinstance(address, str) for address in addresses):
                    return (
                        f"the addresses are no texts (store.get returns bytes): {short(addresses)}"
                    )
            case _:
                text = f"the process at {one.address} returned {short(one.result)}: return "
                return f"{text}(rank, addresses), a number and the list of all addresses"
    ranks = [one.result[0] for one in visits]
    if sorted(ranks) != [*range(P)]:
        text = f"the ranks are {sorted(ranks)}, expected each of 0 to {P - 1} once"
        if former and len({*ranks}) == P:
            text += ": the number of the attempt belongs into every key"
        return race or text
    for one in visits:
        rank, addresses = one.result
        place = f"the process at {one.address}, rank {rank}, returned"
        if old := former & {*addresses}:
            why = "of an attempt before: the number of the attempt belongs into every key"
            return f"{place} {min(old)}, an address {why}"
        if len(addresses) != P:
            why = "store.get waits for a key until it is set"
            return f"{place} {len(addresses)} addresses of {P} processes: {why}"
        if strange := {*addresses} - known:
            return f"{place} {short(min(strange))}, which is the address of no process"
        if addresses[rank] != one.address:
            return f"{place} at place {rank} the address {addresses[rank]}: its own belongs there"
    if len({tuple(one.result[1]) for one in visits}) > 1:
        return "two processes found different lists"
    return None


def _race(visits: Sequence[Visit]) -> Found:
    """Two processes that write under one key what both have read there, or what differs."""
    found = None
    for key in sorted({use.key for one in visits for use in one.uses if use.op == "set"}):
        writers, values, read_first = [], set(), True
        for one in visits:
            ops = [use.op for use in one.uses if use.key == key]
            if "set" in ops:
                writers.append(one.address)
                values |= {use.value for use in one.uses if use.key == key and use.op == "set"}
                read_first &= any(op in ("get", "add", "check") for op in ops[: ops.index("set")])
        if len(writers) < 2:
            continue
        who = f"the processes at {writers[0]} and {writers[1]} both "
        if read_first:
            why = "store.add reads and writes in one step"
            return f"{who}read {key}, and then both wrote it: {why}"
        if len(values) > 1:
            found = found or f"{who}write their own value under {key}, so one of them is lost"
    return found


# The learner's rendezvous, drawn: what each process asks of the store, and when it waits


def own_run(name: str, fn: Callable, status: str, world_size: int = 4) -> OwnRun:
    """Run a learner's rendezvous once more, the processes one after another; nothing is raised."""
    if status == NOT_ATTEMPTED:
        return OwnRun.failed(name, status)
    try:
        with undrawn():
            more: dict[str, Any] = {"device": "cpu", "timeout_s": _TIMEOUT_S}
            visits = run(_come_later, fn, world_size=world_size, **more).values
    except (WorkerError, ValueError):
        return OwnRun.failed(name, status)
    if not any(one.uses for one in visits):
        return OwnRun(name, "the store was not used, so there is nothing to draw.")
    # Lanes in the order in which the processes came.
    order = sorted(visits, key=lambda one: [use.start_s for use in one.uses][:1])
    ops = dict.fromkeys(use.op for one in visits for use in one.uses)
    ranks = [
        one.result[0] if isinstance(one.result, list) and one.result else "-" for one in order
    ]
    waits = [[u.end_s - u.start_s for u in one.uses if u.op in _WAITS] for one in order]
    rows = {"rank": list(map(str, ranks))}
    rows |= {op: [str(sum(use.op == op for use in one.uses)) for one in order] for op in ops}
    rows["waited"] = [f"{sum(seconds) * 1e3:.0f} ms" for seconds in waits]
    text = "not right yet" if status == NOT_YET else status
    return OwnRun(
        name,
        f"{text}, in {sum(len(one.uses) for one in order)} operations on the store.",
        [f"process {number}" for number in range(1, 1 + len(order))],
        rows,
        f"{world_size} processes, each {_LATER_S * 1e3:g} ms after the one before. Below, a lane "
        "is a process, in the order in which they came.",
        _drawn(order),
    )


_WAITS = ("get", "wait")


def _come_later(comm: Comm, fn: Callable) -> Visit:
    real = dist.PrefixStore("own run", dist.distributed_c10d._get_default_store())
    comm.barrier()
    time.sleep(_LATER_S * comm.rank)
    return visit(fn, SharedStore(real), f"10.0.0.{comm.rank + 1}:29400", comm.world_size, 0)


def _drawn(visits: list[Visit]) -> "CaptionedFigure":
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.timeline import timeline

    start_s = min(use.start_s for one in visits for use in one.uses)
    spans = []
    for lane, one in enumerate(visits):
        for use in one.uses:
            kind = "wait" if use.op in _WAITS else use.op
            # A number that is drawn needs a width.
            end_s = max(use.end_s, use.start_s + 1e-3)
            spans.append(Span(lane, kind, use.start_s - start_s, end_s - start_s))
    title = "Your rendezvous: who asks the store, and who waits"
    return timeline(Trace.merge([spans]), title=title)
