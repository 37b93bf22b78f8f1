"""A store of ``torch.distributed`` as a learner's function sees it: every use of it is noted."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from workbook.exercises.grader.compare import plain

# A process waits this long for a key: the others need some milliseconds to set it.
_PATIENCE_S = 1.0
# Who does the same so many times in a row waits for something.
_OFTEN = 3
# What tells a process its rank, or that of others.
_TOLD = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Use(NamedTuple):
    """One operation on the store: what was asked, and when, in seconds of this machine's clock."""

    op: str
    key: str
    value: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Visit:
    """What one process has done and returned in one attempt.

    ``waited_for`` is the key for which it waited in vain; ``result`` is then None. (No tuple: a
    check makes lists of those.)
    """

    address: str
    result: Any
    uses: tuple[Use, ...]
    waited_for: str = ""


class _NeverSet(RuntimeError):
    """Raised in a learner's function where a real store would raise after its timeout."""

    def __init__(self, key: str):
        super().__init__(f"nobody sets the key {key!r}")
        self.key = key


class Died(BaseException):
    """Raised in a learner's function on a process that is to die there."""


class SharedStore(dist.Store):
    """A ``torch.distributed`` store that notes its uses, and can hold a process back after each.

    Args:
        real: the store that all processes share.
        after_use: called with the number of each use, once it is done.
        before_wait: called before a wait for a key that is not set yet, and when the function
            begins to ask again and again.
    """

    def __init__(
        self,
        real: dist.Store,
        after_use: Callable[[int], None] = lambda number: None,
        before_wait: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self._real, self._after_use, self._before_wait = real, after_use, before_wait
        self.uses: list[Use] = []

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set."""
        return self._use("get", key, self._waiting, [key], partial(self._real.get, key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until all are set."""
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        return self._use("wait", ", ".join(keys), self._waiting, list(keys), lambda: None)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, whatever it holds."""
        return self._use("set", key, self._real.set, key, value, told=value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first, and return the sum, in one step."""
        return self._use("add", key, self._real.add, key, value, told=value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a key if it holds what is expected ("" if it is not set); returns what it holds."""
        do, values = self._real.compare_set, (expected_value, desired_value)
        return self._use("compare_set", key, do, key, *values, told=desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        found = self._use("check", ", ".join(keys), self._real.check, list(keys))
        if not found:
            self._before_wait()
        return found

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._use("delete_key", key, self._real.delete_key, key)

    def num_keys(self) -> int:
        """The number of keys."""
        return self._use("num_keys", "", self._real.num_keys)

    def _use(self, op: str, key: str, do: Callable, *args: Any, told: Any = None, **more: Any):
        start_s = time.monotonic()
        result = do(*args, **more)
        value = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        self.uses.append(Use(op, key, value, start_s, time.monotonic()))
        if len(self.uses) >= _OFTEN and {use[:3] for use in self.uses[-_OFTEN:]} == {
            (op, key, value)
        }:
            self._before_wait()
        self._after_use(len(self.uses))
        return result

    def _waiting(self, keys: list[str], then: Callable[[], Any]) -> Any:
        if not self._real.check(keys):
            self._before_wait()
        try:
            self._real.wait(keys, timedelta(seconds=_PATIENCE_S))
        except RuntimeError:
            raise _NeverSet(next(k for k in keys if not self._real.check([k]))) from None
        return then()


def visit(fn: Callable, store: SharedStore, address: str, world_size: int, attempt: int) -> Visit:
    """Call ``fn`` on one process, which is not told its rank; what it did, and returned."""
    result, waited_for = None, ""
    try:
        with untold():
            result = plain(fn(store, address, world_size, attempt))
    except _NeverSet as error:
        waited_for = error.key
    return Visit(address, result, tuple(store.uses), waited_for)


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Take what tells a process its rank out of the environment."""
    told = {name: os.environ.pop(name) for name in _TOLD if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(told)
