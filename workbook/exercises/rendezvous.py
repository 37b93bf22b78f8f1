"""Page 12: processes that get their ranks, and learn of each other, from a store.

The processes and the store are real, and three attempts are made on one store, since a store
outlives the attempt that failed. In the first, all processes go step by step together, so that a
rank that is read and written back in two steps is taken twice. In the second, one process comes
and dies after its first entry. In the third, they come one after another.

Symbols: P processes.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from typing import Any
from unittest import mock

import torch.distributed as dist

from labkit.comm.comm import Comm
from workbook.exercises.grader import WORLD_SIZES, Case, Verdict, returns
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import Found

TOGETHER, ONE_DIES, IN_TURN = ATTEMPTS = range(3)
# So many operations of each process are made step by step, and each waits so long at most.
_STEPS, _STEP_S = 6, 0.3
# A process comes when those before it wait or have ended, but after this time at the latest.
_TURN_S = 2.0
# A process waits this long for a key: the others need some milliseconds to set it.
_PATIENCE_S = 1.0
# Who asks the same so many times in a row waits for something.
_OFTEN = 3
# What tells a process its rank, or that of others.
_TOLD = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

_calls = itertools.count()


def meet(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(store, address, world_size, attempt)``: returns (rank, addresses by rank).

    Every process has an address and the same store, a ``torch.distributed`` store. Any order of
    ranks is right, if every process finds the same one. Its own run draws the third attempt.
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
    if again := verdict.run_again:
        # No message of labkit is sent, so only the figure says something.
        verdict.run_again = lambda status, P: (run := again(status, P)).figure or run
    return verdict


class _NeverSet(RuntimeError):
    """Raised in a learner's function where a real store would raise after its timeout."""


class _Died(BaseException):
    """Raised in a learner's function on the process that is to die there."""


class SharedStore(dist.Store):
    """A ``torch.distributed`` store that notes what is set, and can hold a process back.

    Args:
        real: the store that all processes share.
        comm: records each use as a span.
        after_use: called after each use.
        before_wait: called before a wait for a key that is not set yet, and when the function
            begins to ask again and again.
    """

    def __init__(
        self,
        real: dist.Store,
        comm: Comm,
        after_use: Callable[[], None],
        before_wait: Callable[[], None],
    ):
        super().__init__()
        self._real, self._comm = real, comm
        self._after_use, self._before_wait = after_use, before_wait
        self._asked: list[tuple] = []
        self.keys: set[str] = set()

    def get(self, key: str) -> bytes:
        return self._use("get", key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._use("wait", list(keys))

    def set(self, key: str, value: str | bytes) -> None:
        self.keys.add(key)
        self._use("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._use("add", key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._use("compare_set", key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._use("check", list(keys))

    def delete_key(self, key: str) -> bool:
        return self._use("delete_key", key)

    def num_keys(self) -> int:
        return self._use("num_keys")

    def _use(self, op: str, *args: Any) -> Any:
        needed = {"get": args[:1], "wait": args[0]}[op] if op in ("get", "wait") else ()
        waits = not self._real.check(list(needed)) if needed else False
        self._asked = [*self._asked, (op, *args)][-_OFTEN:]
        if waits or self._asked.count((op, *args)) == _OFTEN:
            self._before_wait()
        with self._comm.span("wait" if waits else op):
            for key in needed:
                try:
                    self._real.wait([key], timedelta(seconds=_PATIENCE_S))
                except RuntimeError:
                    raise _NeverSet(key) from None
            result = None if op == "wait" else getattr(self._real, op)(*args)
        if result is False:
            self._before_wait()
        self._after_use()
        return result


def _meet(fn: Callable, comm: Comm, case: Case) -> list[list]:
    """On a process: the first and the last attempt; no further one if somebody waited in vain."""
    shared = dist.PrefixStore(f"check/{next(_calls)}", dist.distributed_c10d._get_default_store())
    real, found = dist.PrefixStore("store", shared), []
    for attempt in ATTEMPTS:
        notes = dist.PrefixStore(f"notes/{attempt}", shared)
        one = _attempt(fn, comm, case, real, notes, attempt)
        found += [one] if attempt != ONE_DIES else []
        if notes.add("in vain", 0):
            break
    return found


def _attempt(
    fn: Callable, comm: Comm, case: Case, real: dist.Store, notes: dist.Store, attempt: int
) -> list:
    """A process's [address, result, keys set, key waited for in vain]; ``notes`` count."""
    P, address = case.world_size, _address(comm.rank, attempt, case)
    # Neither the numbers of the check's own ranks nor their order have a meaning.
    place = (case.integer(0, 1, 7) + comm.rank) % P
    settled, steps = [], itertools.count(1)

    def settle() -> None:
        if not settled:
            settled.append(notes.add("settled", 1))

    def after_use() -> None:
        """Wait until all others have come as far, or wait, or have ended."""
        if attempt == ONE_DIES:
            raise _Died
        if attempt == TOGETHER and (number := next(steps)) <= _STEPS:
            notes.add(str(number), 1)
            _until(lambda: notes.add(str(number), 0) + notes.add("settled", 0) >= P, _STEP_S)

    store, result, waited_for = SharedStore(real, comm, after_use, settle), None, ""
    if attempt == IN_TURN:
        _until(lambda: notes.add("settled", 0) >= place, _TURN_S)
    try:
        if attempt != ONE_DIES or place == 0:
            with mock.patch.dict(os.environ):
                for name in _TOLD:
                    os.environ.pop(name, None)
                result = plain(fn(store, address, P, attempt))
    except _NeverSet as error:
        waited_for = str(error)
        notes.add("in vain", int(attempt != ONE_DIES))
    except (_Died, Exception):
        # Alone, a process fails in one way or another.
        if attempt != ONE_DIES:
            raise
    settle()
    notes.add("ended", 1)
    _until(lambda: notes.add("ended", 0) >= P, inf)
    return [address, result, sorted(store.keys), waited_for]


def _until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Wait; not forever, since a process may just sleep."""
    deadline_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _address(rank: int, attempt: int, case: Case) -> str:
    """The address of a process, another one in each attempt."""
    key = 100 * attempt + rank
    host, port = case.integer(key, 2, 250), case.integer(1000 + key, 20_000, 60_000)
    return f"10.0.{10 * attempt + rank}.{host}:{port}"


def _judge(case: Case, values: list[Any]) -> Found:
    """What is wrong in the first attempt that went wrong. ``values``: by process and attempt."""
    for attempt, ranks in enumerate(zip(*values)):
        if found := _wrong_meeting(ranks):
            later = "in a later attempt, with a store that holds the keys of those before (is the "
            later += "number of the attempt in every key?): "
            return later + found if attempt else found
    return None


def _wrong_meeting(processes: Sequence[list]) -> Found:
    P, setters = len(processes), Counter(key for one in processes for key in one[2])
    shared = [key for key, count in setters.items() if count > 1]
    race = ""
    if shared:
        race = (
            f"; {setters[shared[0]]} processes set {shared[0]}, so one of their values is lost: "
        )
        race += "store.add reads and writes in one step"
    for address, result, _, waited_for in processes:
        if waited_for:
            text = f"the process at {address} waits for {waited_for}, which nobody sets"
            return f"{text}; what was set: {', '.join(sorted(setters)) or 'nothing'}{race}"
        match result:
            case [int(rank), [*addresses]] if not isinstance(rank, bool):
                if all(isinstance(one, str) for one in addresses):
                    continue
        text = f"the process at {address} returned {short(result)}: return (rank, addresses), a "
        return f"{text}number and a list of texts (store.get returns bytes)"
    by_rank = sorted((result[0], address) for address, result, *_ in processes)
    ranks, expected = [rank for rank, _ in by_rank], [address for _, address in by_rank]
    if ranks != [*range(P)]:
        return f"the ranks are {ranks}, expected each of 0 to {P - 1} once{race}"
    for address, (rank, addresses), *_ in processes:
        if addresses != expected:
            text = f"the process at {address}, rank {rank}, returned {short(addresses)}, expected "
            return f"{text}the addresses of all processes by their ranks, {short(expected)}"
    return None
