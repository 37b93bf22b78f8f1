"""Operations under way: PyTorch's receipt for one, and the line in which they are carried out.

``torch.distributed`` gives a ``Work`` for every call. A backend in Python has to make its own, and
PyTorch's C++ side has views on how one may fail.
"""

import contextlib
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
        self._error: BaseException | None = None
        self.over = threading.Event()
        self._done: Future[None] = Future()
        # DDP's C++ side ignores Future.set_exception, but not a callback that raises.
        self._future = self._done.then(self._deliver)

    def carry_out(self, on_error: Callable[[BaseException], None]) -> None:
        work_for(self._location)
        try:
            self._operation()
        except BaseException as error:
            # Ctrl-C and sys.exit too: they go on from where the operation is waited for, and do
            # not end the thread, or nothing that is queued would ever be over.
            self._error = error
            on_error(error)
        # What it works on may be large, and a receipt may be kept.
        self._operation = None
        self.over.set()
        self._done.set_result(None)

    def _deliver(self, _done: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0
        if not self.over.wait(seconds or None):
            raise TimeoutError(f"the operation was still going after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result


class Line(threading.Thread):
    """Operations on one ``Comm``, one after the other, in a thread of their own.

    Whoever waits for what they ask carries it out themselves when nothing else is under way: to
    hand it over and be woken up again takes longer than a small message does.
    """

    def __init__(self, name: str, comm: Comm):
        super().__init__(name=name, daemon=True)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._comm = comm
        self._adding, self._working = threading.Lock(), threading.Lock()
        self._latest_over = threading.Event()
        self._latest_over.set()
        self.start()

    def add(
        self,
        operation: Callable[[Comm], object],
        result: list[Tensor],
        is_waited_for: bool = False,
    ) -> Task:
        """Queue an operation; with ``is_waited_for`` it may be over on return."""
        task = Task(lambda: operation(self._comm), result)
        with self._adding:
            # In a thread, what came before may have left the queue and not have begun yet.
            is_first, self._latest_over = self._latest_over.is_set(), task.over
            is_mine = is_waited_for and is_first and self._working.acquire(blocking=False)
            if not is_mine:
                self._tasks.put(task)
        if is_mine:
            try:
                with torch.no_grad():
                    self._carry_out(task)
            finally:
                self._working.release()
        return task

    def run(self) -> None:
        torch.set_grad_enabled(False)
        while task := self._tasks.get():
            with self._working:
                self._carry_out(task)
            del task

    def _carry_out(self, task: Task) -> None:
        posted = self._comm.posted
        task.carry_out(lambda error: self._tell(error, posted))

    def _tell(self, error: BaseException, posted: int) -> None:
        """Let the other ranks fail at once, unless this one was refused before it began."""
        if self._comm.posted != posted:
            self._comm.give_up(f"{type(error).__name__}: {error}")

    def end(self, patience_s: float | None = None) -> None:
        """End after what is queued; with ``patience_s``, after what is under way."""
        if patience_s is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._tasks.get_nowait()
        self._tasks.put(None)
        self.join(patience_s)
