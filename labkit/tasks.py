"""Operations under way: PyTorch's receipt for one, and the thread that carries them out in order.

``torch.distributed`` gives a ``Work`` for every call. A backend in Python has to make its own, and
PyTorch's C++ side has views on how one may fail.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit.comm import Comm
from labkit.sources import caller_location, work_for


class Task(dist.Work):
    """One operation under way: PyTorch's receipt for it.

    Args:
        operation: what to do, without arguments.
        result: the tensors that hold the result then.
    """

    def __init__(self, operation: Callable[[], object], result: list[Tensor]):
        super().__init__()
        self._operation: Callable[[], object] | None = operation
        self._result = result
        self._location = caller_location()
        self._error: Exception | None = None
        self._over = threading.Event()
        self._done: Future[None] = Future()
        # DDP's C++ side ignores Future.set_exception, but not a callback that raises.
        self._future = self._done.then(self._deliver)

    def carry_out(self, on_error: Callable[[Exception], None]) -> None:
        work_for(self._location)
        try:
            self._operation()
        except Exception as error:
            self._error = error
            on_error(error)
        # What it works on may be large, and a receipt may be kept.
        self._operation = None
        self._over.set()
        self._done.set_result(None)

    def _deliver(self, _done: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0
        if not self._over.wait(seconds or None):
            raise TimeoutError(f"the operation was still going after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result


class Line(threading.Thread):
    """A thread that carries out operations on one ``Comm``, one after the other."""

    def __init__(self, name: str, comm: Comm):
        super().__init__(name=name, daemon=True)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._comm = comm
        self.start()

    def add(self, operation: Callable[[Comm], object], result: list[Tensor]) -> Task:
        task = Task(lambda: operation(self._comm), result)
        self._tasks.put(task)
        return task

    def run(self) -> None:
        torch.set_grad_enabled(False)
        while task := self._tasks.get():
            posted = self._comm.posted
            task.carry_out(lambda error, posted=posted: self._tell(error, posted))
            del task

    def _tell(self, error: Exception, posted: int) -> None:
        """Let the other ranks fail at once, unless this one was refused before it began."""
        if self._comm.posted != posted:
            self._comm.give_up(f"{type(error).__name__}: {error}")

    def end(self, patience_s: float | None = None) -> None:
        """End after what is queued; with ``patience_s``, after what is under way."""
        while patience_s is not None and not self._tasks.empty():
            self._tasks.get()
        self._tasks.put(None)
        self.join(patience_s)
