"""Operations under way: PyTorch's receipt for one, and the line in which they are carried out.

``torch.distributed`` gives a ``Work`` for every call. A backend in Python has to make its own, and
PyTorch's C++ side has views on how one may fail.
"""

import collections
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit.comm.comm import Comm, describe
from labkit.comm.source_lines import caller_location, work_for

# How often who waits looks whether there is still hope.
_LOOK_S = 0.25
# A transfer that comes to the group's timeout says which rank is missing: it may speak first.
_GRACE_S = 1.0
# How long a line stands still for a callback that neither ends nor calls an operation.
_LONGEST_PATIENCE_S = 5.0


class Task(dist.Work):
    """One operation under way: PyTorch's receipt for it.

    Args:
        name: the operation, as the profiler shows it; empty for what it is not to show.
        inputs: the tensors that the profiler shows the shapes of.
        result: the tensors that hold the result then.
        why_late: tells what keeps the operation for longer than the group's timeout; empty while
            there is hope.
    """

    def __init__(
        self,
        name: str,
        inputs: list[Tensor],
        result: list[Tensor],
        why_late: Callable[[], str],
    ):
        super().__init__()
        self._what = name, inputs
        self._result = result
        self._why_late = why_late
        self.location = caller_location()
        self.began_s = time.monotonic()
        self.source = -1
        self.over = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[list[Tensor]] | None = None
        # Futures that wait for the end; to pop one is to be the only one who completes it.
        self._incomplete: collections.deque[Future[None]] = collections.deque()
        self._record = None
        if name and torch._C._autograd._profiler_enabled():
            self._record = torch._C._profiler._RecordFunctionFast(f"labkit:{name}", inputs)
            self._record.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        """The operation is over; futures are not complete yet, since their callbacks may wait."""
        self._error = error
        # What it works on may be large, and a receipt may be kept.
        self._what = str(self), []
        if self._record is not None:
            # From another thread it is an operation of its own length there, as gloo's are.
            self._record.__exit__(None, None, None)
        self.over.set()

    def grad_mode(self):
        """What the operation runs under: only inference mode lets inference tensors be changed."""
        has_inference = any(tensor.is_inference() for tensor in self._result)
        return torch.inference_mode() if has_inference else contextlib.nullcontext()

    @property
    def has_futures(self) -> bool:
        return bool(self._incomplete)

    def complete_futures(self) -> None:
        """Run, in this thread, the callbacks that hang on ``get_future()``."""
        with contextlib.suppress(IndexError):
            while True:
                self._incomplete.pop().set_result(None)

    def get_future(self) -> Future[list[Tensor]]:
        if self._future is None:
            done: Future[None] = Future()
            # DDP's C++ side ignores Future.set_exception, but not a callback that raises.
            self._future = done.then(self._deliver)
            self._incomplete.append(done)
            if self.over.is_set():
                self.complete_futures()
        return self._future

    def _deliver(self, _done: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the operation's error; TimeoutError when there is no hope that it will end."""
        limit_s = timeout.total_seconds() if timeout else 0
        if limit_s and not self.over.wait(limit_s):
            raise TimeoutError(f"{self} was still going after {limit_s:g} s")
        while not self.over.wait(_LOOK_S):
            if late := self._why_late():
                raise TimeoutError(f"{self} is waited for in vain: {late}")
        if self._error is not None:
            raise self._error
        return True

    def __str__(self) -> str:
        name, inputs = self._what
        return " ".join([name, *map(describe, inputs[:1])])

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result

    def source_rank(self) -> int:
        """Where a message came from; -1 for what is no receive."""
        return self.source

    _source_rank = source_rank


class Line(threading.Thread):
    """Operations on one ``Comm``, one after the other, in a thread of their own.

    Whoever waits for what they ask carries it out themselves when nothing else is under way: to
    hand it over and be woken up again takes longer than a small message does.

    Callbacks of futures run in a second thread, the deputy's, and the line waits for them: what a
    callback calls is carried out right there, before all that is queued. So the order is the same
    on every rank, however the ranks' main threads run; over gloo it is not, and PowerSGD with
    several buckets ends in a timeout.

    Args:
        name: of the thread.
        comm: what the operations work on.
        timeout_s: the process group's: the longest that one operation may take.
    """

    def __init__(self, name: str, comm: Comm, timeout_s: float = math.inf):
        super().__init__(name=name, daemon=True)
        self.timeout_s = timeout_s
        self._comm = comm
        self._queue: queue.SimpleQueue[tuple[Task, Callable] | None] = queue.SimpleQueue()
        self._adding, self._working = threading.Lock(), threading.Lock()
        self._num_queued = 0
        self._under_way: Task | None = None
        self._carrier: threading.Thread | None = None
        self._deputy: Deputy | None = None
        self._calls_of_deputy = 0
        self.start()

    def add(
        self,
        name: str,
        operation: Callable[[Comm], object],
        inputs: list[Tensor],
        result: list[Tensor],
        is_waited_for: bool = False,
    ) -> Task:
        """Queue an operation; with ``is_waited_for`` it may be over on return.

        Raises:
            ValueError: called from inside an operation of this line, which it would wait for.
        """
        task, me = Task(name, inputs, result, self.why_late), threading.current_thread()
        if me is self._carrier:
            raise ValueError(
                f"{task} is called inside {self._under_way} of the same group, which would wait "
                "for itself: use comm, or another group"
            )
        if me is self._deputy and self._carry_out_for_deputy(task, operation):
            return task
        with self._adding:
            # In a thread, what came before may have left the queue and not have begun yet.
            is_first = not self._num_queued
            is_mine = is_waited_for and is_first and self._working.acquire(blocking=False)
            if not is_mine:
                self._num_queued += 1
                self._queue.put((task, operation))
        if is_mine:
            try:
                with torch.no_grad():
                    self._carry_out(task, operation)
            finally:
                self._working.release()
        return task

    def run(self) -> None:
        torch.set_grad_enabled(False)
        while queued := self._queue.get():
            with self._working:
                self._carry_out(*queued)
            self._let_callbacks_run(queued[0])
            with self._adding:
                self._num_queued -= 1
            del queued

    def _carry_out(self, task: Task, operation: Callable[[Comm], object]) -> None:
        posted, error = self._comm.posted, None
        self._carrier, self._under_way = threading.current_thread(), task
        work_for(task.location)
        task.began_s = time.monotonic()
        try:
            with task.grad_mode():
                operation(self._comm)
        except BaseException as raised:
            # Ctrl-C and sys.exit too: they go on from where the operation is waited for, and do
            # not end the thread, or nothing that is queued would ever be over.
            error = raised
            # Let the other ranks fail at once, unless this one was refused before it began.
            if self._comm.posted != posted:
                self._comm.give_up(f"{type(error).__name__}: {error}")
        self._carrier = self._under_way = None
        task.end(error)

    def _let_callbacks_run(self, task: Task) -> None:
        if not task.has_futures:
            return
        if self._deputy is None:
            self._deputy = Deputy(f"{self.name}-callbacks")
        over, calls = self._deputy.complete(task), self._calls_of_deputy
        while not over.wait(min(_LONGEST_PATIENCE_S, self.timeout_s / 4)):
            with self._working:
                if self._calls_of_deputy == calls:
                    # It may wait for what is queued: go on without it.
                    self._deputy.end()
                    self._deputy = None
                    return
                calls = self._calls_of_deputy

    def _carry_out_for_deputy(self, task: Task, operation: Callable[[Comm], object]) -> bool:
        """False when the line has gone on without its deputy."""
        with self._working:
            if threading.current_thread() is not self._deputy:
                return False
            self._calls_of_deputy += 1
            self._carry_out(task, operation)
            return True

    def why_late(self) -> str:
        task = self._under_way
        took_s = time.monotonic() - task.began_s if task else 0
        if took_s < self.timeout_s + _GRACE_S:
            return ""
        where = f", called at {task.location}," if task.location else ""
        return (
            f"{task}{where} has been under way for {took_s:.1f} s, and the timeout of its process "
            f"group is {self.timeout_s:g} s"
        )

    def end(self, patience_s: float | None = None) -> bool:
        """End after what is queued; with ``patience_s``, after what is under way.

        Returns whether it has; what takes longer than the group's timeout is left behind.
        """
        if patience_s is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
        self._queue.put(None)
        started_s = time.monotonic()
        while self.is_alive() and not self.why_late():
            left_s = _LOOK_S if patience_s is None else started_s + patience_s - time.monotonic()
            if left_s <= 0:
                break
            self.join(min(_LOOK_S, left_s))
        if self._deputy is not None and not self.is_alive():
            self._deputy.end()
            self._deputy.join(patience_s)
        return not self.is_alive()


class Deputy(threading.Thread):
    """Completes futures for a line: what hangs on them may wait, for the line too."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self._queue: queue.SimpleQueue[tuple[Task, threading.Event] | None] = queue.SimpleQueue()
        self.start()

    def complete(self, task: Task) -> threading.Event:
        """Returns what is set when the callbacks have returned."""
        over = threading.Event()
        self._queue.put((task, over))
        return over

    def run(self) -> None:
        torch.set_grad_enabled(False)
        while queued := self._queue.get():
            task, over = queued
            work_for(task.location)
            task.complete_futures()
            over.set()
            del queued, task

    def end(self) -> None:
        """After the callbacks that run."""
        self._queue.put(None)
