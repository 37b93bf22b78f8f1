"""Operations that go on in a separate thread: ``Work``, their handle, and ``WorkQueue``.

A queue carries out operations on one ``Comm`` one after another, in the order of the calls.
"""

import atexit
import collections
import contextlib
import functools
import math
import queue
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

from labkit.comm.comm import Comm
from labkit.comm.source_lines import caller_location, credit_to
from labkit.comm.tensors import describe

Operation = Callable[[Comm], object]

# The interval at which a waiting thread checks whether the operation can still end.
LOOK_S = 0.25
# A transfer that reaches the group's timeout names the missing rank: its error comes first.
_GRACE_S = 1.0
# How long a queue waits for a callback that neither ends nor calls an operation.
_LONGEST_PATIENCE_S = 5.0
# How long a process that exits waits for an operation that is under way.
_LAST_PATIENCE_S = 2.0


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


class WorkQueue(threading.Thread):
    """Carries out operations on one ``Comm`` in the order of the calls.

    A caller that waits for its operation carries it out itself when nothing else is under way:
    to hand it over takes longer than to send a small message.

    Callbacks of futures run in a second thread, and the queue waits for them. An operation that a
    callback calls is carried out there, before all queued ones: so the order is the same on every
    rank. (On gloo it is not, and PowerSGD with several buckets ends in a timeout.)

    On a GPU the operations have a stream and always a thread of their own. As in
    ``torch.distributed``, an operation begins when the caller's stream has reached the call, and
    the stream of whoever calls ``wait`` goes on after the operation.

    ``timeout_s`` is the process group's: the longest that one operation may take.
    """

    def __init__(self, name: str, comm: Comm, timeout_s: float = math.inf):
        super().__init__(name=name, daemon=True)
        self.timeout_s = timeout_s
        self._comm = comm
        self._queue: queue.SimpleQueue[tuple[Work, Operation] | None] = queue.SimpleQueue()
        self._adding, self._working = threading.Lock(), threading.Lock()
        self._num_queued = 0
        self._under_way: Work | None = None
        self._worker: threading.Thread | None = None
        self._callbacks: CallbackThread | None = None
        self._calls_of_callbacks = 0
        self._stream: torch.cuda.Stream | None = None
        if comm.device.type == "cuda":
            # Before the other streams: its small kernels would wait behind the large ones there.
            self._stream = torch.cuda.Stream(comm.device, priority=-1)
        self.start()

    def add(
        self,
        name: str,
        operation: Operation,
        inputs: list[Tensor],
        result: list[Tensor],
        is_waited_for: bool = False,
    ) -> Work:
        """Queue an operation; with ``is_waited_for`` it may already be done on return.

        Raises:
            ValueError: called from inside an operation of this queue, which would wait for itself.
        """
        work, me = Work(name, inputs, result, self.why_late), threading.current_thread()
        if me is self._worker:
            raise ValueError(
                f"{work} is called inside {self._under_way} of the same group, which would wait "
                "for itself: use comm, or another group"
            )
        if self._stream is not None:
            is_waited_for = False
            work.begins_after_caller(self._stream)
        if me is self._callbacks and self._carry_out_for_callback(work, operation):
            return work
        with self._adding:
            # Not the queue's size: an operation taken from it may not have begun yet.
            is_first = not self._num_queued
            is_mine = is_waited_for and is_first and self._working.acquire(blocking=False)
            if not is_mine:
                self._num_queued += 1
                self._queue.put((work, operation))
        if is_mine:
            try:
                with torch.no_grad():
                    self._carry_out(work, operation)
            finally:
                self._working.release()
        return work

    def run(self) -> None:
        torch.set_grad_enabled(False)
        use_stream(self._stream)
        while queued := self._queue.get():
            with self._working:
                self._carry_out(*queued)
            self._let_callbacks_run(queued[0])
            with self._adding:
                self._num_queued -= 1
            del queued

    def _carry_out(self, work: Work, operation: Operation) -> None:
        board, rank, error = self._comm.session.board, self._comm.rank, None
        posted = board.posted(rank)
        self._worker, self._under_way = threading.current_thread(), work
        credit_to(work.location)
        work.started_s = time.monotonic()
        try:
            with work.grad_mode(), work.on_stream(self._stream):
                operation(self._comm)
        except BaseException as raised:
            # Ctrl-C and sys.exit, too: ``Work.wait`` raises them. If they ended this thread, the
            # queued operations would never be carried out.
            error = raised
            # Let the other ranks fail at once, unless the operation was refused at the start.
            if board.posted(rank) != posted:
                board.give_up(rank, f"{type(error).__name__}: {error}")
        self._worker = self._under_way = None
        work.finish(error)

    def _let_callbacks_run(self, work: Work) -> None:
        if not work.has_futures:
            return
        if self._callbacks is None:
            self._callbacks = CallbackThread(f"{self.name}-callbacks", self._stream)
        done, calls = self._callbacks.complete(work), self._calls_of_callbacks
        while not done.wait(min(_LONGEST_PATIENCE_S, self.timeout_s / 4)):
            with self._working:
                if self._calls_of_callbacks == calls:
                    # The callback may wait for a queued operation: continue without it.
                    self._callbacks.end()
                    self._callbacks = None
                    return
                calls = self._calls_of_callbacks

    def _carry_out_for_callback(self, work: Work, operation: Operation) -> bool:
        """Carry out a callback's operation; False if the queue no longer waits for it."""
        with self._working:
            if threading.current_thread() is not self._callbacks:
                return False
            self._calls_of_callbacks += 1
            self._carry_out(work, operation)
            return True

    def why_late(self) -> str:
        """Which operation has taken longer than the timeout, as text; empty if none has."""
        work = self._under_way
        took_s = time.monotonic() - work.started_s if work else 0
        if work is None or took_s < self.timeout_s + _GRACE_S:
            return ""
        where = f", called at {work.location}," if work.location else ""
        return (
            f"{work}{where} has been under way for {took_s:.1f} s, and the timeout of its process "
            f"group is {self.timeout_s:g} s"
        )

    def end(self, patience_s: float | None = None) -> bool:
        """End after all queued operations; with ``patience_s``, after the one under way.

        Returns whether the thread has ended. It is left running if its operation takes longer than
        the group's timeout, or than ``patience_s``.
        """
        if patience_s is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
        self._queue.put(None)
        started_s = time.monotonic()
        while self.is_alive() and not self.why_late():
            left_s = LOOK_S if patience_s is None else started_s + patience_s - time.monotonic()
            if left_s <= 0:
                break
            self.join(min(LOOK_S, left_s))
        if self._callbacks is not None and not self.is_alive():
            self._callbacks.end()
            self._callbacks.join(patience_s)
        return not self.is_alive()


@functools.cache
def work_queue_of(comm: Comm) -> WorkQueue:
    """The one queue of all that is sent on ``comm`` during a forward and backward pass.

    DDP's buckets, those of a second replica in the same backward, and the batch statistics of
    SyncBatchNorm share it, so that their messages do not mix.
    """
    # No timeout here: the run has a deadline.
    work_queue = WorkQueue("labkit-ddp", comm, timeout_s=float("inf"))
    atexit.register(work_queue.end, _LAST_PATIENCE_S)
    return work_queue


class CallbackThread(threading.Thread):
    """Completes futures for a queue, as their callbacks may block, even on the queue itself."""

    def __init__(self, name: str, stream: torch.cuda.Stream | None = None):
        super().__init__(name=name, daemon=True)
        self._stream = stream
        self._queue: queue.SimpleQueue[tuple[Work, threading.Event] | None] = queue.SimpleQueue()
        self.start()

    def complete(self, work: Work) -> threading.Event:
        """Returns an event that is set when the callbacks have returned."""
        done = threading.Event()
        self._queue.put((work, done))
        return done

    def run(self) -> None:
        torch.set_grad_enabled(False)
        use_stream(self._stream)
        while queued := self._queue.get():
            work, done = queued
            credit_to(work.location)
            work.complete_futures()
            done.set()
            del queued, work

    def end(self) -> None:
        """End after the callbacks that are running."""
        self._queue.put(None)


def use_stream(stream: torch.cuda.Stream | None) -> None:
    """Let this thread queue its work on ``stream``, and make the stream's GPU its current one."""
    if stream is not None:
        torch.cuda.set_stream(stream)
