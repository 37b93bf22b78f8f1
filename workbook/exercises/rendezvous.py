"""Page 14: processes that get their ranks, and learn of each other, from a store.

The processes and the store are real, and three attempts are made on one store, since a store
outlives the attempt that failed. In the first, all processes go step by step together, so that a
rank that is read and written back in two steps is taken twice. In the second, one process dies
after its first entry. In the third, they come one after another.

Symbols: P processes.
"""

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partialmethod
from math import inf
from typing import Any
from unittest import mock

import torch.distributed as dist

from labkit.engine.comm.comm import Comm
from workbook.exercises.grader import Case, Check
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import Found

TOGETHER, ONE_DIES, IN_TURN = range(3)
# So many operations of each process are made step by step, and each waits so long at most.
_STEPS = 6
_STEP_S = 0.3
# A process comes when those before it wait or have ended, but after this time at the latest.
_TURN_S = 2.0
# A process waits this long for a key: the others need some milliseconds to set it.
_PATIENCE_S = 1.0

_calls = itertools.count()


class SharedStore(dist.Store):
    """The store ``real``, which notes the keys that are set and that for which it waits in vain.

    It calls ``after_use``, and ``before_wait`` before a wait or when a key is not there.
    """

    def __init__(self, real: dist.Store, comm: Comm, after_use: Callable, before_wait: Callable):
        super().__init__()
        self._real = real
        self._comm = comm
        self._after_use = after_use
        self._before_wait = before_wait
        self.keys = set[str]()
        self.never_set = ""

    def _use(self, op: str, *args: Any) -> Any:
        keys = []
        if op == "get":
            keys = [args[0]]
        elif op == "wait":
            keys = list(args[0])
        waits = bool(keys) and not self._real.check(keys)
        if waits:
            self._before_wait()
        with self._comm.span("wait" if waits else op):
            for key in keys:
                self.never_set = key
                self._real.wait([key], timedelta(seconds=_PATIENCE_S))
            self.never_set = ""
            if op == "set":
                self.keys.add(args[0])
            result = None if op == "wait" else getattr(self._real, op)(*args)
        if result is False:
            self._before_wait()
        self._after_use()
        return result

    get = partialmethod(_use, "get")
    set = partialmethod(_use, "set")
    add = partialmethod(_use, "add")
    compare_set = partialmethod(_use, "compare_set")
    check = partialmethod(_use, "check")
    wait = partialmethod(_use, "wait")
    delete_key = partialmethod(_use, "delete_key")
    num_keys = partialmethod(_use, "num_keys")


def _meet(fn: Callable, comm: Comm, case: Case) -> list[list]:
    """Make a process's first and last attempt; no further one if somebody waited in vain."""
    shared = dist.PrefixStore(f"check/{next(_calls)}", dist.distributed_c10d._get_default_store())
    real = dist.PrefixStore("store", shared)
    attempts = []
    for attempt in (TOGETHER, IN_TURN):
        notes = dist.PrefixStore(f"notes/{attempt}", shared)
        attempts.append(_attempt(fn, comm, case, real, notes, attempt))
        if notes.add("in vain", 0):
            break
    return attempts


def _attempt(
    fn: Callable, comm: Comm, case: Case, real: dist.Store, notes: dist.Store, attempt: int
) -> list:
    """A process's [address, result, keys set, key waited for in vain]; ``notes`` count."""
    P = case.world_size
    key = 100 * attempt + comm.rank
    host = case.integer(key, 2, 250)
    port = case.integer(1000 + key, 20_000, 60_000)
    address = f"10.0.{10 * attempt + comm.rank}.{host}:{port}"
    # Neither the numbers of the check's own ranks nor their order have a meaning.
    turn = (case.integer(0, 1, 7) + comm.rank) % P
    settled = []
    steps = itertools.count(1)

    def settle() -> None:
        if not settled:
            settled.append(notes.add("settled", 1))

    def keep_step() -> None:
        """Wait until all others have come as far, or wait, or have ended."""
        number = next(steps)
        if attempt == TOGETHER and number <= _STEPS:
            notes.add(str(number), 1)
            _until(lambda: notes.add(str(number), 0) + notes.add("settled", 0) >= P, _STEP_S)

    store = SharedStore(real, comm, keep_step, settle)
    result = None
    with mock.patch.dict(os.environ, clear=True):  # no RANK tells a process its own
        if attempt == IN_TURN:
            _until(lambda: notes.add("settled", 0) >= turn, _TURN_S)
            if turn == 0:
                with suppress(SystemExit):
                    fn(SharedStore(real, comm, sys.exit, sys.exit), address, P, ONE_DIES)
        try:
            result = plain(fn(store, address, P, attempt))
        except Exception:
            if not store.never_set:
                raise
            notes.add("in vain", 1)
    settle()
    notes.add("ended", 1)
    _until(lambda: notes.add("ended", 0) >= P, inf)
    return [address, result, sorted(store.keys), store.never_set]


def _until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Wait; not forever, since a process may just sleep."""
    deadline_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _wrong_attempt(processes: Sequence[list]) -> Found:
    setters: Counter[str] = Counter()
    for _, _, keys, _ in processes:
        setters.update(keys)
    race = ""
    for key, count in setters.items():
        if count > 1:
            race = f"; {count} processes set {key}, so one of their values is lost"
            race += ": store.add reads and writes in one step"
            break
    for address, result, _, waited_for in processes:
        if waited_for:
            text = f"the process at {address} waits for {waited_for}, which nobody sets"
            return f"{text}; what was set: {', '.join(sorted(setters)) or 'nothing'}{race}"
        match result:
            case [int(rank), [*addresses]] if not isinstance(rank, bool):
                if all(isinstance(address, str) for address in addresses):
                    continue
                if None in addresses:
                    text = (
                        f"the process at {address} returned {short(result)}: it knows no address"
                    )
                    return f"{text} of rank {addresses.index(None)}, and has to wait for it"
        text = f"the process at {address} returned {short(result)}\nreturn (rank, addresses), a "
        return f"{text}number and a list of strings (store.get returns bytes)"
    by_rank = sorted((result[0], address) for address, result, *_ in processes)
    ranks = [rank for rank, _ in by_rank]
    expected = [address for _, address in by_rank]
    if ranks != [*range(len(ranks))]:
        text = f"the ranks are {ranks}, expected each of 0 to {len(ranks) - 1} once{race}"
        begins_at_1 = ranks == [*range(1, len(ranks) + 1)]
        return f"{text}\nranks begin at 0, and the first add returns 1" if begins_at_1 else text
    for address, (rank, addresses), *_ in processes:
        if addresses != expected:
            text = f"the process at {address}, rank {rank}, returned {short(addresses)}, expected "
            return f"{text}the addresses of all processes by their ranks, {short(expected)}"
    return None


def _judge(case: Case, values: list[Any]) -> Found:
    """The fault of the first attempt that went wrong. ``values``: by process and attempt."""
    for attempt, processes in enumerate(zip(*values)):
        fault = _wrong_attempt(processes)
        if fault and attempt:
            cause = "\neach attempt needs its own keys: the store still holds those before"
            return f"in a later attempt, {fault}" + cause * ("\n" not in fault)
        if fault:
            return fault
    return None


# Returned are (rank, addresses by rank). Any order of ranks is right, if every process finds the
# same one. Its own run draws the third attempt.
meet = Check(
    "rendezvous.meet",
    signature="store, address, world_size, attempt",
    inputs=lambda rank, case: (case,),
    written=None,
    call=_meet,
    judge=_judge,
    sizes=(),
    nouns=("process", ""),
)
