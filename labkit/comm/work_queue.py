"""Operations on one ``Comm``, carried out one after another in a separate thread."""

import atexit
import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from labkit.comm.comm import Comm
from labkit.comm.source_lines import credit_to
from labkit.comm.work import LOOK_S, Work

Operation = Callable[[Comm], object]

# A transfer that reaches the group's timeout names the missing rank: its error comes first.
_GRACE_S = 1.0
# How long a queue waits for a callback that neither ends nor calls an operation.
_LONGEST_PATIENCE_S = 5.0
# How long a process that exits waits for an operation that is under way.
_LAST_PATIENCE_S = 2.0


class WorkQueue(threading.Thread):
    """Carries out operations on one ``Comm`` in the order of the calls.

    A caller that waits for its operation carries it out itself when nothing else is under way:
    handing it over and being woken up again takes longer than sending a small message.

    Callbacks of futures run in a second thread, and the queue waits for them. An operation that a
    callback calls is carried out in that thread, before all queued operations. So the order is the
    same on every rank, whatever the timing of the main threads. PyTorch's gloo backend does not
    guarantee this order: there PowerSGD with several buckets ends in a timeout.

    On a GPU the operations have a stream of their own, and always another thread: neither the
    kernels nor the launches of the caller wait for a transfer. As in ``torch.distributed``, an
    operation begins when the caller's stream has reached the call, and the stream of whoever
    calls ``wait`` goes on after the operation.

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
