"""Operations that run in a separate thread: ``Work``, their handle, and ``WorkQueue``.

A queue carries out operations on one ``Comm`` one after another, in the order of the calls.
"""

import atexit
import collections
import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit.engine.comm.comm import Comm
from labkit.engine.comm.source_lines import caller_location, credit_to
from labkit.engine.comm.transport import describe
from labkit.engine.errors import PeerLostError
from labkit.engine.tracing import Recorder

Operation = Callable[[Comm], object]

_GRACE_S = 1.0
# How long a process that exits waits for an operation that is under way.
_LAST_PATIENCE_S = 2.0
# Of the operations that this process has called, in all queues.
_call_numbers = itertools.count(1)


class Work(dist.Work):
    """One operation under way.

    The profiler shows its ``name``, unless that is empty, and the shapes of its ``inputs``.
    ``result`` lists the tensors that hold the result in the end; ``wait`` waits for ``timeout_s``.
    """

    def __init__(
        self,
        name: str,
        inputs: list[Tensor],
        result: list[Tensor],
        timeout_s: float = threading.TIMEOUT_MAX,
    ):
        super().__init__()
        self._label = " ".join([name, *map(describe, inputs[:1])])
        self._result = result
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self.location = caller_location()
        self.source = -1
        # In the caller's trace: the number of this operation, and the second of its call.
        self.call: tuple[int, float] | None = None
        self.recorder: Recorder | None = None
        self.done = threading.Event()
        self._error: BaseException | None = None
        # On a GPU: the caller's stream at the call, and the operation's stream at its end.
        self.called: torch.Event | None = None
        self.ended: torch.Event | None = None
        self._future: Future[list[Tensor]] | None = None
        # The future to complete at the end, by the thread that pops it.
        self.incomplete: collections.deque[Future[None]] = collections.deque()
        # Completing it ends the profiler's record.
        self._recorded: Future[None] | None = None
        self._caller = threading.current_thread()
        if name and torch._C._autograd._profiler_enabled():
            begin: Any = torch._C._autograd._record_function_with_args_enter  # type: ignore
            record = begin(f"labkit:{name}", *inputs)
            self._recorded = Future()
            # Another thread cannot end a record, as it is not profiled; this callback can.
            torch.ops.profiler._call_end_callbacks_on_jit_fut(record, self._recorded)

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as done; futures are completed later: their callbacks may block."""
        self._error = error
        if self._recorded is not None:
            self._end_record(self._recorded)
        self.done.set()

    def _end_record(self, recorded: Future[None]) -> None:
        """End it in another thread than the caller's: so the profiler shows it as asynchronous.

        That is how gloo's operations are shown, whoever carries them out.
        """
        if threading.current_thread() is not self._caller:
            recorded.set_result(None)
            return
        ending = threading.Thread(target=recorded.set_result, args=(None,))
        ending.start()
        ending.join()

    def complete_futures(self) -> None:
        """Run the callbacks attached to ``get_future()``, in this thread."""
        with contextlib.suppress(IndexError):
            self.incomplete.pop().set_result(None)

    def get_future(self) -> Future[list[Tensor]]:
        if self._future is None:
            done: Future[None] = Future()
            # DDP's C++ side ignores Future.set_exception, but not a callback that raises.
            self._future = done.then(self._deliver)
            self.incomplete.append(done)
            if self.done.is_set():
                self.complete_futures()
        return self._future

    def _deliver(self, _done: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has ended; on a GPU the caller's stream then waits for it.

        Raises:
            TimeoutError: it takes longer than ``timeout``, by default the group's.
            Exception: the error of the operation.
        """
        limit_s = timeout.total_seconds() if timeout else self._timeout_s
        if self.recorder is not None and self.call is not None:
            with self.recorder.waiting_for(self.call[0]):
                has_ended = self.done.wait(limit_s)
        else:
            has_ended = self.done.wait(limit_s)
        if not has_ended:
            origin = f"{self}, called at {self.location}"
            raise TimeoutError(f"{origin}, was still running after {limit_s:g} s")
        if self._error is not None:
            raise self._error
        if self.ended is not None:
            torch.cuda.current_stream(self.ended.device).wait_event(self.ended)
        return True

    def __str__(self) -> str:
        return self._label

    def is_completed(self) -> bool:
        return self.done.is_set() and (self.ended is None or self.ended.query())

    def result(self) -> list[Tensor]:
        return self._result

    def source_rank(self) -> int:
        """Return the rank a message came from; -1 unless this is a receive."""
        return self.source

    _source_rank = source_rank


class AllOf(dist.Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def completed(operation: Callable[[], object], tensors: list[Tensor]) -> Work:
    """Carry out ``operation()`` at once, in this thread.

    Returns:
        Its ``Work``, which holds ``tensors``, or the error that the operation has raised.
    """
    work = Work("", [], tensors)
    try:
        operation()
        work.finish()
    except Exception as error:
        work.finish(error)
    return work


class WorkQueue(threading.Thread):
    """Carries out operations on one ``Comm`` in the order of the calls.

    A caller that waits for its operation carries it out itself when nothing else is under way:
    to hand it over takes longer than to send a small message.

    Callbacks of futures run in the queue's thread. An operation that a callback calls is carried
    out there at once, before all queued ones: so the order is the same on every rank.

    On a GPU the operations have their own stream and always their own thread. As in
    ``torch.distributed``, an operation begins when the caller's stream has reached the call, and
    the stream of whoever calls ``wait`` goes on after the operation.

    ``timeout_s`` is the process group's: the longest that one operation may take.
    """

    def __init__(self, name: str, comm: Comm, timeout_s: float = math.inf):
        super().__init__(name=name, daemon=True)
        self.timeout_s = timeout_s
        self._comm = comm
        self._queue: queue.SimpleQueue[tuple[Work, Operation] | None] = queue.SimpleQueue()
        self._adding = threading.Lock()
        self._working = threading.Lock()
        self._num_queued = 0
        # The operation under way, and in which thread.
        self.under_way: Work | None = None
        self._worker: threading.Thread | None = None
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
        """Queue an operation; with ``is_waited_for`` it may already be done on return."""
        # A transfer that reaches the timeout names the missing rank: its error comes first.
        work = Work(name, inputs, result, self.timeout_s + _GRACE_S)
        caller = threading.current_thread()
        if caller is self._worker:
            raise ValueError(
                f"{work} is called inside {self.under_way} of the same group, which would wait "
                "for itself: use comm, or another group"
            )
        if self._stream is not None:
            for tensor in (*inputs, *result):
                tensor.record_stream(self._stream)
            work.called = torch.cuda.current_stream(self._stream.device).record_event()
        else:
            # (A GPU reaches the call later, and its times are the trace's.)
            work.recorder = self._comm.session.recorder
            called_s = time.perf_counter() - work.recorder.origin
            work.call = next(_call_numbers), called_s
        if caller is self:
            # A callback of the operation that has just ended.
            with self._working:
                self._run_operation(work, operation)
            return work
        with self._adding:
            # Not the queue's size: an operation taken from it may not have begun yet.
            is_idle = is_waited_for and self._stream is None and not self._num_queued
            runs_here = is_idle and self._working.acquire(blocking=False)
            if not runs_here:
                self._num_queued += 1
                self._queue.put((work, operation))
        if runs_here:
            try:
                with torch.no_grad():
                    self._run_operation(work, operation)
            finally:
                self._working.release()
        return work

    def run(self) -> None:
        torch.set_grad_enabled(False)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        while queued := self._queue.get():
            work, operation = queued
            with self._working:
                self._run_operation(work, operation)
            work.complete_futures()
            with self._adding:
                self._num_queued -= 1
            # The tensors must not stay alive until the next operation comes.
            del queued, work, operation

    def _run_operation(self, work: Work, operation: Operation) -> None:
        session = self._comm.session
        board, rank = session.board, session.rank
        posted_before = board.posted(rank)
        error = None
        self.under_way = work
        self._worker = threading.current_thread()
        session.recorder.carry_out(work.call)
        credit_to(work.location)
        # Inference tensors may only be changed in inference mode.
        has_inference = any(tensor.is_inference() for tensor in work.result())
        try:
            if reason := board.gave_up():
                # What the failed operation has left under way would be taken for this one's.
                raise PeerLostError(
                    f"{reason}. After that the ranks' messages do not belong together: make the "
                    "group, or the run, anew"
                )
            with torch.inference_mode() if has_inference else contextlib.nullcontext():
                if self._stream is not None and work.called is not None:
                    self._stream.wait_event(work.called)
                operation(self._comm)
                if self._stream is not None:
                    work.ended = self._stream.record_event()
        except BaseException as raised:
            # Ctrl-C and sys.exit, too: ``Work.wait`` raises them. If they ended this thread, the
            # queued operations would never be carried out.
            error = raised
            # Let the other ranks fail at once, unless the operation was refused at the start.
            if board.posted(rank) != posted_before:
                board.give_up(rank, f"{type(error).__name__}: {error}")
        self.under_way = self._worker = None
        session.recorder.carry_out(None)
        work.finish(error)

    def end(self, patience_s: float | None = None) -> bool:
        """End after all queued operations; with ``patience_s``, after the one under way.

        Returns whether the thread has ended within the group's timeout, or ``patience_s``.
        """
        if patience_s is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
        self._queue.put(None)
        limit_s = self.timeout_s + _GRACE_S if patience_s is None else patience_s
        self.join(min(limit_s, threading.TIMEOUT_MAX))
        return not self.is_alive()


def work_queue_of(comm: Comm) -> WorkQueue:
    """Return the one queue of all that is sent on ``comm`` in a forward and backward pass.

    DDP's buckets, those of a second replica in the same backward, and the batch statistics of
    SyncBatchNorm share it, so that their messages do not mix.
    """
    queues = comm.session.work_queues
    if comm not in queues:
        # No timeout here: the run has a deadline.
        work_queue = WorkQueue("labkit-ddp", comm)
        atexit.register(work_queue.end, _LAST_PATIENCE_S)

        def end() -> None:
            atexit.unregister(work_queue.end)
            work_queue.end(_LAST_PATIENCE_S)

        queues[comm] = work_queue
        comm.session.at_close.append(end)
    return queues[comm]
