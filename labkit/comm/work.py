"""``Work``: the handle that ``torch.distributed`` returns for an operation under way."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit.comm.comm import describe
from labkit.comm.source_lines import caller_location

# The interval at which a waiting thread checks whether the operation can still end.
LOOK_S = 0.25


class Work(dist.Work):
    """One operation under way.

    Args:
        name: the operation, as the profiler shows it; empty hides it from the profiler.
        inputs: the tensors whose shapes the profiler shows.
        result: the tensors that hold the result when the operation is done.
        why_late: returns why the operation takes longer than the group's timeout; empty while it
            does not.
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
        # On a GPU: the caller's stream at the call, and the operation's stream at its end.
        self._called: torch.Event | None = None
        self._ended: torch.Event | None = None
        self._future: Future[list[Tensor]] | None = None
        # Futures to complete at the end. Only the thread that pops a future completes it.
        self._incomplete: collections.deque[Future[None]] = collections.deque()
        self._record: Any = None
        if name and torch._C._autograd._profiler_enabled():
            self._record = torch._C._profiler._RecordFunctionFast(f"labkit:{name}", inputs)
            self._record.__enter__()

    def begins_after_caller(self, stream: torch.cuda.Stream) -> None:
        """Note how far the caller's stream is; ``stream`` is the one that will be used."""
        for tensor in (*self._inputs, *self._result):
            tensor.record_stream(stream)
        self._called = torch.cuda.current_stream(stream.device).record_event()

    @contextlib.contextmanager
    def on_stream(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Wrap the operation, whose thread queues its work on ``stream``; None on the CPU."""
        if stream is not None and self._called is not None:
            stream.wait_event(self._called)
        yield
        if stream is not None:
            self._ended = stream.record_event()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as done; futures are completed later: their callbacks may block."""
        self._error = error
        # The inputs may be large, and the caller may keep this handle.
        self._name, self._inputs = str(self), []
        if self._record is not None:
            # A record that ends in another thread is shown there as a separate operation, as
            # with gloo.
            self._record.__exit__(None, None, None)
        self.done.set()

    def grad_mode(self) -> AbstractContextManager[object]:
        """The mode to run in: inference tensors may only be changed in inference mode."""
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
        """Wait until the operation has ended; on a GPU until all of it is queued.

        There the caller's stream waits for its end, as in ``torch.distributed``.

        Raises:
            TimeoutError: it takes longer than ``timeout``, or than the group's timeout.
            Exception: the error of the operation.
        """
        limit_s = timeout.total_seconds() if timeout else 0
        if limit_s and not self.done.wait(limit_s):
            raise TimeoutError(f"{self} was still running after {limit_s:g} s")
        while not self.done.wait(LOOK_S):
            if late := self._why_late():
                raise TimeoutError(f"{self} does not end: {late}")
        if self._error is not None:
            raise self._error
        if self._ended is not None:
            torch.cuda.current_stream(self._ended.device).wait_event(self._ended)
        return True

    def __str__(self) -> str:
        return " ".join([self._name, *map(describe, self._inputs[:1])])

    def is_completed(self) -> bool:
        return self.done.is_set() and (self._ended is None or self._ended.query())

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


def carried_out(operation: Callable[[], object], tensors: list[Tensor]) -> Work:
    """Carry out ``operation()`` at once, in this thread.

    Returns:
        Its ``Work``, which holds ``tensors``, or the error that the operation has raised.
    """
    work, error = Work("", [], tensors, str), None
    try:
        operation()
    except Exception as raised:
        error = raised
    work.finish(error)
    return work
