"""The check of page 12: processes that get their ranks, and learn of each other, from a store.

The processes and the store are real, and three attempts are made on one store, since a store
outlives the attempt that failed. In the first, all processes go step by step together, so that a
rank that is read and written back in two steps is taken twice. In the second, one process comes
and dies after its first entry. In the third, they come one after another.

Symbols: P processes.
"""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from labkit.comm.comm import Comm
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Mistake, Verdict, grade
from workbook.exercises.grader.shared_store import Died, SharedStore, Use, Visit, visit
from workbook.exercises.rendezvous_run import own_run

TOGETHER, ONE_DIES, IN_TURN = ATTEMPTS = range(3)
# So many operations of each process are made step by step, and each waits so long at most.
_STEPS, _STEP_S = 6, 0.3
# A process comes when those before it wait or have ended, but after this time at the latest.
_TURN_S = 2.0
_POLL_S = 0.001
_READS = ("get", "add", "check")

_calls = itertools.count()


def meet(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(store, address, world_size, attempt)``: returns (rank, addresses by rank).

    Every process has an address and the same store, a ``torch.distributed`` store. Any order of
    ranks is right, if every process finds the same one.
    """
    exercise = Exercise(
        "rendezvous.meet",
        signature="store, address, world_size, attempt",
        inputs=lambda rank, case: (case,),
        written=None,
        call=_meet,
        judge=_judge,
        sizes=(),
        nouns=("process", ""),
    )
    verdict = grade(fn, exercise, world_sizes)
    verdict.run_again = partial(own_run, exercise.name, fn)
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
        until_s = time.monotonic() + limit_s
        while groups and time.monotonic() < until_s:
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
            _die(fn, SharedStore(real, _dies), address, case.world_size)
        if visits[-1].waited_for:
            notes.set("in vain", "1")
        meeting.end(attempt)
        if notes.check(["in vain"]):
            break
    return visits


def _die(fn: Callable, store: SharedStore, address: str, world_size: int) -> None:
    # Alone, it fails in one way or another.
    with contextlib.suppress(Died, Exception):
        visit(fn, store, address, world_size, ONE_DIES)


def _dies(number: int) -> None:
    raise Died


def _address(rank: int, attempt: int, case: Case) -> str:
    """The address of a process, another one in each attempt."""
    key = 100 * attempt + rank
    host, port = case.integer(key, 2, 250), case.integer(1000 + key, 20_000, 60_000)
    return f"10.0.{10 * attempt + rank}.{host}:{port}"


# What went wrong


def _judge(case: Case, values: list[Any]) -> Mistake | None:
    """The mistake of the first attempt that went wrong. ``values``: the visits of each process."""
    former = {_address(r, one, case) for r in range(case.world_size) for one in ATTEMPTS[:-1]}
    for attempt, visits in zip((TOGETHER, IN_TURN), zip(*values)):
        found = _in_vain(visits) or _kinds(visits) or _ranks(visits, attempt)
        found = found or _addresses(visits, former if attempt else set())
        if found:
            return Mistake("rendezvous.later", what=found) if attempt else found
    return None


def _in_vain(visits: Sequence[Visit]) -> Mistake | None:
    """Why a process waited for a key that nobody has set."""
    waiting = next((one for one in visits if one.waited_for), None)
    if waiting is None:
        return None
    if taken := _taken_twice(visits):
        return taken
    keys = sorted({use.key for one in visits for use in one.uses if use.op in ("set", "add")})
    was_set = ", ".join(keys) or "none"
    return Mistake(
        "rendezvous.waits_forever", address=waiting.address, key=waiting.waited_for, keys=was_set
    )


def _taken_twice(visits: Sequence[Visit]) -> Mistake | None:
    """Two processes that write different things, or a count that both have read, under one key."""
    wrote: dict[str, dict[str, str]] = {}
    for one in visits:
        for use in one.uses:
            if use.op == "set":
                wrote.setdefault(use.key, {})[one.address] = use.value
    race, same = None, None
    for key, by_process in wrote.items():
        if len(by_process) < 2:
            continue
        one, other, *_ = by_process
        details = {"one": one, "other": other, "key": key}
        if all(_reads_first(v.uses, key) for v in visits if v.address in by_process):
            race = race or Mistake("rendezvous.race", **details)
        elif len({*by_process.values()}) > 1:
            same = same or Mistake("rendezvous.same_key", **details)
    return race or same


def _reads_first(uses: Sequence[Use], key: str) -> bool:
    ops = [use.op for use in uses if use.key == key]
    return any(op in _READS for op in ops[: ops.index("set")])


def _kinds(visits: Sequence[Visit]) -> Mistake | None:
    for one in visits:
        match one.result:
            case [int(rank), [*addresses]] if not isinstance(rank, bool):
                strange = next((a for a in addresses if not isinstance(a, str)), None)
                if isinstance(strange, bytes):
                    return Mistake("rendezvous.bytes", found=strange)
                if strange is not None or None in addresses:
                    return Mistake("rendezvous.strange", found=repr(strange))
            case _:
                found = "nothing (None)" if one.result is None else f"{one.result!r:.80}"
                return Mistake("rendezvous.kind", address=one.address, found=found)
    return None


def _ranks(visits: Sequence[Visit], attempt: int) -> Mistake | None:
    P, ranks = len(visits), [one.result[0] for one in visits]
    if sorted(ranks) == [*range(P)]:
        return None
    if attempt and len({*ranks}) == P and (strange := {*ranks} - {*range(P)}):
        return Mistake("rendezvous.counts_on", rank=min(strange), last=P - 1)
    if taken := _taken_twice(visits):
        return taken
    if sorted(ranks) == [*range(1, P + 1)]:
        return Mistake("rendezvous.from_one", last=P)
    if not any(ranks):
        return Mistake("rendezvous.all_zero")
    told = ", ".join(map(str, sorted(ranks)))
    rank, count = Counter(ranks).most_common(1)[0]
    why = Mistake("rendezvous.taken", rank=rank, count=count) if count > 1 else None
    return Mistake("rendezvous.other_ranks", why, ranks=told, last=P - 1)


def _addresses(visits: Sequence[Visit], former: set[str]) -> Mistake | None:
    P, known = len(visits), {one.address for one in visits}
    # The first to come knows the fewest.
    for one in sorted(visits, key=lambda visit: len(visit.result[1])):
        rank, addresses = one.result
        if old := former & {*addresses}:
            return Mistake("rendezvous.former", address=one.address, old=min(old))
        if len(addresses) != P:
            few = "few" if len(addresses) < P else "many"
            return Mistake(f"rendezvous.{few}", address=one.address, found=len(addresses), due=P)
        if strange := [a for a in addresses if a not in known]:
            return Mistake("rendezvous.strange", found=repr(strange[0]))
        if addresses[rank] != one.address:
            details = {"address": one.address, "rank": rank, "found": addresses[rank]}
            return Mistake("rendezvous.not_own", **details)
    # Each process stands at its own rank in its own list.
    if len({tuple(one.result[1]) for one in visits}) > 1:
        return Mistake("rendezvous.differ")
    return None
