"""Watching a run that no launcher watches: under torchrun, in a thread of every rank.

torchrun sees the processes of its own host and knows nothing of what they do. Here the ranks watch
each other. In each rank a thread wakes up four times a second. It sees at once when a process of
its host ends. On each host the first rank that can do so publishes what its ranks are doing,
mirrors what the others do, and looks for a deadlock, a mismatch, a stopped rank, a silent host.

Whoever finds a fault writes the explanation into the store, and each host's board; the first one
counts, on all hosts. On each host one rank prints it. In all ranks the operations that wait raise
an error, so that the learner's ``finally`` runs, and ``labkit.run`` raises the explanation. A rank
that does not come back in ``_GRACE_S`` is ended.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from labkit.comm.board import LEFT, Board
from labkit.comm.connections import Connection, are_alive, cut, new_connections
from labkit.comm.torch_transport import first_line
from labkit.errors import PreemptedError, WorkerError
from labkit.runtime.between_hosts.faults import Faults
from labkit.runtime.between_hosts.neighbours import Neighbours
from labkit.runtime.between_hosts.rows import Rows
from labkit.runtime.between_hosts.termination import Termination
from labkit.runtime.between_hosts.verdict import Verdict
from labkit.runtime.failures import report_of_failure

_TICK_S = 0.25
# How long the end waits for the threads.
_JOIN_S = 1.0
# After the first sign of a failure: time for its cause to become known.
_SETTLE_S, _STORE_S = 4.0, 1.0
# From the explanation: until the learner's code is interrupted, and from then until the rank is
# ended. On a busy machine a rank that is about to raise may get no core for seconds.
_INTERRUPT_S, _GRACE_S = 2.0, 6.0
_POLL_S = 0.05
# How long a rank that has failed stays, so that all others hear of it.
_TELL_S = 0.5
_OVER, _WELL = "over", b"well"


def tell(text: str) -> None:
    """Say it on stderr, in one piece: the ranks of a host often share one."""
    sys.stderr.write(f"labkit: {text}\n")
    sys.stderr.flush()


class Watch:
    """The watch over one run, in one rank.

    Args:
        rank: this rank.
        board: of this host.
        near: the ranks that share the board.
        hosts: the ranks of each host.
        names: of the hosts.
        connect: opens a connection of its own to the store of this run; None for one host.
        address: where the store is, for messages.
        connections: those of the process group, to be cut when the run has failed.
        abort: ends what is queued in the process group.

    Attributes:
        verdict: why the run ends; None while it goes on.
    """

    def __init__(
        self,
        rank: int,
        board: Board,
        near: Sequence[int],
        hosts: Sequence[Sequence[int]],
        names: Sequence[str],
        connect: Callable[[], Any] | None,
        address: str,
        connections: Sequence[Connection],
        abort: Callable[[], None],
    ):
        self._rank, self._board = rank, board
        self._address, self._connections, self._abort = address, connections, abort
        self._faults = Faults(board, hosts, near, names)
        self._neighbours = Neighbours(rank, board, near)
        self._more_boards: list[Board] = []
        self._rows: Rows | None = None
        self._store: Any = None
        self._waiter: threading.Thread | None = None
        if connect is not None:
            with new_connections():
                self._store, self._waiting_store = connect(), connect()
            host = next(host for host, ranks in enumerate(hosts) if rank in ranks)
            self._rows = Rows(self._store, board, hosts, host)
            self._waiter = threading.Thread(
                target=self._await_word, name="labkit-word", daemon=True
            )
        self.verdict: Verdict | None = None
        self._found = threading.Event()
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._store_lost_s = 0.0
        self._store_error: str | None = None
        self._wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._termination = Termination(self._wake)
        self._is_asked = False
        self._thread = threading.Thread(target=self._work, name="labkit-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._waiter is not None:
            self._waiter.start()

    def also_ends(self, board: Board) -> None:
        """Let a fault also end the operations that wait on another board."""
        self._more_boards.append(board)

    # Called by the rank

    def failed(self, error: BaseException) -> BaseException:
        """The error to raise for one that has ended this rank's function, or came after it."""
        # (Of a preemption, all ranks have agreed that they end here.)
        if self.verdict is None and isinstance(error, KeyboardInterrupt | PreemptedError):
            return error
        if self.verdict is None:
            self._tell(error)
        assert self.verdict is not None
        self._leave()
        self._record()
        self._await_neighbours()
        if self.verdict.is_raised and self.verdict.rank == self._rank:
            return error
        return self.verdict.error()

    def close(self) -> None:
        """Stop watching: the run has ended on this rank."""
        self._leave()
        self._board.ranks[self._rank]["state"] = LEFT
        if self.verdict is None and self._store is not None and self._store_error is None:
            # The thread that waits for a word has to end, too.
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_OVER, "", _WELL.decode())
        self._termination.close()
        os.write(self._wake, b".")
        threads = [thread for thread in (self._thread, self._waiter) if thread is not None]
        for thread in threads:
            thread.join(_JOIN_S)
        if not any(thread.is_alive() for thread in threads):
            self._neighbours.close()
            for handle in (self._wake, self._wake_end):
                os.close(handle)

    def _leave(self) -> None:
        with self._lock:
            self._left.set()

    def _await_neighbours(self) -> None:
        """Give the ranks of this host, and those of all others, the time to hear of it.

        As soon as one rank has ended, torchrun ends the others of its host.
        """
        self._board.ranks[self._rank]["state"] = LEFT
        # They hear of it later than this rank, and end themselves when their own time is over.
        until_s = time.monotonic() + _INTERRUPT_S + 2 * _GRACE_S
        while not self._neighbours.have_left() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        # Only now, so that the ranks of a host leave together.
        time.sleep(_TELL_S)

    def _tell(self, error: BaseException) -> None:
        """Find out, or say, why this rank's function has ended with an error."""
        report = report_of_failure(self._rank, error)
        if report.kind == "peer_lost" and self._found.wait(_SETTLE_S):
            return
        if report.kind == "exited" and self._found.wait(_TELL_S):
            return
        self._conclude(self._faults.of_reports(report))

    def _record(self) -> None:
        """Give the explanation to torchrun, for the summary that it prints."""
        if self.verdict is not None and "TORCHELASTIC_ERROR_FILE" in os.environ:
            try:
                # It records the traceback of the exception that is being handled.
                raise self.verdict.error() from None
            except WorkerError as error:
                with contextlib.suppress(OSError):
                    get_error_handler().record_exception(error)

    # In the thread

    def _work(self) -> None:
        try:
            while not self._left.is_set() and self.verdict is None and not self._is_asked:
                self._sleep()
                if not self._left.is_set():
                    self._look()
            if self._is_asked:
                self._end_as_asked()
            if self.verdict is not None:
                self._end()
        except Exception as error:
            self._termination.let_go()
            what = f"{type(error).__name__}: {error}"
            tell(f"the run goes on, and is no longer watched: {what}")

    def _end_as_asked(self) -> None:
        """End by SIGTERM: torchrun ends this rank, mostly because of another one."""
        self._say()
        self._termination.end()

    def _say(self) -> None:
        """Print the explanation, once per host; Python prints it where the cause was raised."""
        if self.verdict is not None:
            raiser = self.verdict.rank if self.verdict.is_raised else None
            if self._neighbours.is_first(but=raiser, left=True):
                tell(self.verdict.text)

    def _sleep(self) -> None:
        """Until the next look is due, or a process of this host ends, or somebody wakes it."""
        poll = select.poll()
        poll.register(self._wake_end, select.POLLIN)
        for handle in self._neighbours.handles():
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(_TICK_S * 1000):
            if handle == self._wake_end:
                told = os.read(self._wake_end, 64)
                self._is_asked = self._is_asked or self._termination.is_meant(told)

    def _look(self) -> None:
        if found := self._board.conclusion():
            self._take(found)
            return
        ended = self._neighbours.ended()
        verdict = self._faults.of_ends(ended) if ended else None
        if verdict is None and self._neighbours.is_first(left=False):
            verdict = self._on_duty()
        if verdict is not None:
            self._conclude(verdict)

    def _on_duty(self) -> Verdict | None:
        beats, connected = {}, True
        if self._rows is not None:
            if self._store_error is None:
                try:
                    self._rows.exchange()
                except ConnectionError as error:
                    return Verdict.of(WorkerError(str(error)))
                except RuntimeError as error:
                    self._store_error, self._store_lost_s = first_line(error), time.monotonic()
            if self._store_error is not None:
                # Whoever knows more may still say it.
                if time.monotonic() - self._store_lost_s < _STORE_S:
                    return None
                return self._faults.store_is_gone(self._address, self._store_error)
            beats, connected = self._rows.beats, are_alive(self._connections)
        faults = self._faults
        return faults.standing_still(beats) or faults.stopped() or faults.silent(beats, connected)

    def _await_word(self) -> None:
        """Wait until a host has found a fault, or the run has ended."""
        with contextlib.suppress(RuntimeError, OSError):
            found = self._waiting_store.get(_OVER)
            if found != _WELL and self.verdict is None:
                self._board.conclude(found)
                if not self._left.is_set():
                    os.write(self._wake, b".")

    def _conclude(self, verdict: Verdict) -> None:
        """Say on this host and all others why the run ends; what was said first counts."""
        mine = verdict.to_bytes()
        if self._store is not None and self._store_error is None:
            with contextlib.suppress(RuntimeError):
                first = self._store.compare_set(_OVER, "", mine.decode())
                mine = first if first != _WELL else mine
        self._board.conclude(mine)
        self._take(self._board.conclusion())

    def _take(self, found: bytes) -> None:
        try:
            verdict = Verdict.from_bytes(found, self._board.world_size)
        except (ValueError, RecursionError) as error:
            what = f"the store holds an explanation that no rank has written: {error}"
            verdict = Verdict.of(WorkerError(what))
        with self._lock:
            self.verdict = self.verdict or verdict
        self._found.set()

    def _end(self) -> None:
        """End this rank: print why if it is this rank's turn, and let its function raise."""
        assert self.verdict is not None
        self._say()
        first_line = self.verdict.text.splitlines()[0]
        for board in (self._board, *self._more_boards):
            board.give_up(self._rank, first_line)
        cut(self._connections)
        self._abort()
        if self._left.wait(_INTERRUPT_S):
            return
        self._interrupt()
        if not self._left.wait(_GRACE_S):
            self._record()
            sys.stderr.flush()
            os._exit(1)

    def _interrupt(self) -> None:
        """Interrupt the learner's code as Ctrl-C does, unless it handles that itself."""
        with self._lock:
            main = threading.main_thread().ident
            handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            if not self._left.is_set() and not handled and main is not None:
                signal.pthread_kill(main, signal.SIGINT)
