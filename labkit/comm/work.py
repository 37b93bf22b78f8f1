"""``Work``: the handle that ``torch.distributed`` returns for an operation under way."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit.comm.comm import describe
from labkit.comm.source_lines import caller_location

# How often a waiting thread checks whether there is still hope.
LOOK_S = 0.25


class Work(dist.Work):
    """One operation under way.

    Args:
        name: the operation, as the profiler shows it; empty hides it from the profiler.
        inputs: the tensors whose shapes the profiler shows.
        result: the tensors that hold the result when the operation is done.
        why_late: says what keeps the operation longer than the group's timeout; empty while there
            is hope.
    """

    def __init__(
        self, name: str, inputs: list[Tensor], result: list[Tensor], why_late: Callable[[], str]
    ):
        super().__init__()
        self._name, self._inputs = name, inputs
        self._result = result
        self._why_late = why_late
        self.location = caller_location()
        self.started_s = time.monotonic()
        self.source = -1
        self.done = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[list[Tensor]] | None = None
        # Futures that wait for the end. Whoever pops one is the only one to complete it.
        self._incomplete: collections.deque[Future[None]] = collections.deque()
        self._record: Any = None
        if name and torch._C._autograd._profiler_enabled():
            self._record = torch._C._profiler._RecordFunctionFast(f"labkit:{name}", inputs)
            self._record.__enter__()

    def finish(self, error: BaseException | None = None) -> None:
        """The operation is done. Futures are completed separately: their callbacks may wait."""
        self._error = error
        # The inputs may be large, and a handle may be kept.
        self._name, self._inputs = str(self), []
        if self._record is not None:
            # Ended in another thread, it shows there as an operation of its own, as gloo's do.
            self._record.__exit__(None, None, None)
        self.done.set()

    def grad_mode(self) -> AbstractContextManager[object]:
        """The mode to run in: inference tensors may be changed in inference mode only."""
        has_inference = any(tensor.is_inference() for tensor in self._result)
        return torch.inference_mode() if has_inference else contextlib.nullcontext()

    @property
    def has_futures(self) -> bool:
        return bool(self._incomplete)

    def complete_futures(self) -> None:
        """Run the callbacks attached to ``get_future()``, in this thread."""
        with contextlib.suppress(IndexError):
            while True:
                self._incomplete.pop().set_result(None)

    def get_future(self) -> Future[list[Tensor]]:
        if self._future is None:
            done: Future[None] = Future()
            # DDP's C++ side ignores Future.set_exception, but not a callback that raises.
            self._future = done.then(self._deliver)
            self._incomplete.append(done)
            if self.done.is_set():
                self.complete_futures()
        return self._future

    def _deliver(self, _done: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the operation's error; TimeoutError when it cannot be expected to end."""
        limit_s = timeout.total_seconds() if timeout else 0
        if limit_s and not self.done.wait(limit_s):
            raise TimeoutError(f"{self} was still running after {limit_s:g} s")
        while not self.done.wait(LOOK_S):
            if late := self._why_late():
                raise TimeoutError(f"{self} does not end: {late}")
        if self._error is not None:
            raise self._error
        return True

    def __str__(self) -> str:
        return " ".join([self._name, *map(describe, self._inputs[:1])])

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result

    def source_rank(self) -> int:
        """The rank a message came from; -1 unless this is a receive."""
        return self.source

    _source_rank = source_rank
