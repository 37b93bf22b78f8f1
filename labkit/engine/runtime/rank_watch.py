"""Watching a run that no launcher watches, under torchrun and on Ray: the ranks watch each other.

In each rank a thread wakes up twice a second. It posts what the rank is doing, its row of the
status board, in the run's store. The first rank reads all rows, and explains a deadlock, a
mismatch, or lost ranks (all else is the group's timeout). The first explanation in the store
counts: operations that wait raise an error in all ranks, so that the learner's ``finally`` runs,
and ``labkit.run`` raises the explanation.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from labkit.engine.comm.board import LEFT, RETURNED, RUNNING, Board
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.deadlock import find_mismatch, stuck_ranks
from labkit.engine.comm.source_lines import readable
from labkit.engine.comm.torch_transport import cut, first_line
from labkit.engine.errors import DeadlockError, PreemptedError, WorkerError
from labkit.engine.runtime.failures import (
    Evidence,
    deadlock_error,
    failure_error,
    report_of_failure,
)
from labkit.engine.runtime.plain import dump_error, load_error
from labkit.engine.runtime.worker import group_connections, host_names

_TICK_S = 0.5
# After the loss of a peer: a rank that has posted no row for so long is lost.
_SILENT_S = 3.0
# After the loss of a peer: so long a rank waits for an explanation.
_EXPLAINED_S = 10.0
# After the explanation: then a rank ends that is busy elsewhere.
_BUSY_S = 5.0
# After the explanation: so long the others wait for one more to come to its end.
_NOBODY_S = 2.0
# Keys in the run's store.
_ERROR = "error"
_LOOKS = "looks"
_ENDING = "ending"


class Rows:
    """The rows of all ranks' status boards, as each rank posts its own in the store of their run.

    ``board`` has the rows that were read last; by rank, their ``numbers``, and ``read_s``, when
    they were new.
    """

    def __init__(self, store: Any, world_size: int):
        self._store = store
        self._keys = [f"row/{rank}" for rank in range(world_size)]
        self._posted = 0
        self.board = Board(world_size)
        self.numbers = [0] * world_size
        self.read_s = [0.0] * world_size

    def post(self, board: Board, rank: int) -> None:
        self._posted += 1
        self._store.set(self._keys[rank], self._posted.to_bytes(8) + board.pack(rank))

    def read(self) -> bool:
        """Read the rows, once all ranks have posted one; whether they have."""
        if not all(self.numbers) and not self._store.check(self._keys):
            return False
        for rank, data in enumerate(self._store.multi_get(self._keys)):
            number = int.from_bytes(data[:8])
            if number != self.numbers[rank]:
                self.numbers[rank] = number
                self.read_s[rank] = time.monotonic()
                self.board.unpack(rank, data[8:])
        return True


class Watch:
    """The watch over one run, in one rank, with its own connection to the run's store.

    ``error`` says why the run ends, and is None while it goes on; each host prints it once.
    """

    def __init__(self, comm: Comm, store: Any):
        self._rank = comm.rank
        self._size = comm.world_size
        self._hosts = comm.session.hosts
        self._host = next(host for host, ranks in enumerate(self._hosts) if comm.rank in ranks)
        self._board = comm.session.board
        self._store = store
        self._rows = Rows(store, comm.world_size)
        self._looks = 0
        self._looked_s = time.monotonic()
        self._candidate: object = None
        self._candidate_numbers: list[int] = []
        self.error: WorkerError | None = None
        # Set when it is known how the run ends.
        self._over = threading.Event()
        # Set when the rank's function has come to its end.
        self._at_end = threading.Event()
        self._print_lock = threading.Lock()
        self._has_printed = False
        self._thread = threading.Thread(target=self._work, name="labkit-watch", daemon=True)
        self.start = self._thread.start

    # Called by the rank

    def failed(self, error: BaseException) -> BaseException:
        """Return the error to raise for one that has ended this rank's function, or came later."""
        if isinstance(error, KeyboardInterrupt | PreemptedError):
            return error
        report = report_of_failure(self._rank, error)
        is_own = report.kind not in ("peer_lost", "mismatch")
        if report.kind == "peer_lost" and self.error is None:
            doing = f"was waiting at {readable(report.location)}"
            self._board.ranks[self._rank]["gave_up"] = doing.encode()
            self._over.wait(_EXPLAINED_S)
        self._at_end.set()
        own_error = failure_error(Evidence(self._board.copy(), reports={self._rank: report}))
        own_error = with_hosts(own_error, self._hosts, host_names)
        is_first = self.error is None
        if is_own:
            # Before the others hear of it, since torchrun ends all with the first that ends.
            _record(own_error)
        if is_first:
            self._conclude(own_error)
        assert self.error is not None
        if not is_own:
            _record(self.error)
        # Also before: this process may be ended as soon as all have come.
        self._print_once(self.error)
        self._end_together()
        return error if is_own else self.error

    def close(self) -> None:
        """Stop watching: the run has ended on this rank."""
        self._at_end.set()
        self._over.set()
        self._board.ranks[self._rank]["state"] = LEFT
        self._thread.join(2 * _TICK_S)
        with contextlib.suppress(RuntimeError):
            if self.error is None and not self._thread.is_alive():
                self._rows.post(self._board, self._rank)

    def _end_together(self) -> None:
        """Wait until all have heard: with the first that ends torchrun ends others of its host."""
        self._board.ranks[self._rank]["state"] = LEFT
        with contextlib.suppress(RuntimeError):
            count = self._store.add(_ENDING, 1)
            came_s = time.monotonic()
            while count < self._size and time.monotonic() - came_s < _NOBODY_S:
                time.sleep(_TICK_S / 10)
                new_count = self._store.add(_ENDING, 0)
                if new_count != count:
                    count = new_count
                    came_s = time.monotonic()

    # In the thread

    def _work(self) -> None:
        try:
            self._look()
            while not self._over.wait(_TICK_S):
                self._look()
        except RuntimeError as error:
            has_returned = self._board.ranks[self._rank]["state"] == RETURNED
            if not self._over.is_set() and not has_returned:
                text = f"the host of rank 0, {host_names[0]}, has ended, or cannot be reached"
                self._take(WorkerError(f"{text}: its store does not answer ({first_line(error)})"))
        except Exception as error:
            print_error(
                f"the run goes on, and is no longer watched: {type(error).__name__}: {error}"
            )
        if self.error is not None:
            self._end(self.error)

    def _look(self) -> None:
        self._rows.post(self._board, self._rank)
        if self._store.check([_ERROR]):
            self._take(load_error(self._store.get(_ERROR)))
            return
        # Rank 0 reads the rows; if it is gone, the first one that misses its looks.
        now_s = time.monotonic()
        looks = self._store.add(_LOOKS, 0)
        if looks != self._looks:
            self._looks = looks
            self._looked_s = now_s
        if self._rank > 0 and now_s - self._looked_s < _SILENT_S:
            return
        self._looks = self._store.add(_LOOKS, 1)
        if self._rows.read():
            error = self._lost(now_s) or self._standing_still()
            if error is not None:
                self._conclude(with_hosts(error, self._hosts, host_names))

    def _lost(self, now_s: float) -> WorkerError | None:
        """The error of ranks that have gone silent, once another has lost a peer."""
        slots = self._rows.board.ranks
        waiting = slots["gave_up"].nonzero()[0]
        silent = []
        for rank, read_s in enumerate(self._rows.read_s):
            if now_s - read_s > _SILENT_S and slots[rank]["state"] != LEFT:
                silent.append(rank)
        if not len(waiting) or not silent:
            return None
        names = " and ".join(f"rank {rank}" for rank in silent)
        text = (
            f"{names} cannot be reached any more: the "
            "process or its machine has ended, or the network is cut. What has started the ranks "
            "there says how they have ended."
        )
        for rank in waiting:
            text += f"\n  rank {rank} {slots[rank]['gave_up'].decode(errors='replace')}"
        return WorkerError(text, rank=silent[0])

    def _standing_still(self) -> WorkerError | None:
        """The error of a mismatch or a deadlock, if no rank has moved since it was first seen."""
        board = self._rows.board
        numbers = self._rows.numbers
        mismatch = find_mismatch(board)
        stuck = stuck_ranks(board)
        if not mismatch and not stuck:
            self._candidate = None
            return None
        candidate = (mismatch, stuck, board.ranks["ticks"].tolist())
        if candidate != self._candidate:
            self._candidate = candidate
            self._candidate_numbers = list(numbers)
            return None
        # The second row from then on was begun after that look: so at its moment nobody moved.
        for rank in range(self._size):
            is_running = board.ranks[rank]["state"] == RUNNING
            if is_running and numbers[rank] <= self._candidate_numbers[rank] + 1:
                return None
        if mismatch:
            return DeadlockError(readable(mismatch))
        return deadlock_error(board, stuck)

    def _conclude(self, error: WorkerError) -> None:
        """Give all ranks the error that ends the run; the first that a rank gives counts."""
        with contextlib.suppress(RuntimeError):
            error = load_error(self._store.compare_set(_ERROR, "", dump_error(error)))
        self._take(error)

    def _take(self, error: WorkerError) -> None:
        self.error = self.error or error
        self._over.set()

    def _print_once(self, error: WorkerError) -> None:
        """Print the error, unless another rank of this host does; return when it is printed."""
        with self._print_lock:
            if not self._has_printed:
                self._has_printed = True
                count = 1
                with contextlib.suppress(RuntimeError):
                    count = self._store.add(f"printed/{self._host}", 1)
                if count == 1:
                    print_error(str(error))

    def _end(self, error: WorkerError) -> None:
        """Let this rank's function raise an error; end the process if it does not."""
        self._print_once(error)
        self._board.give_up(self._rank, str(error).splitlines()[0])
        cut(group_connections)
        dist.distributed_c10d._get_default_group().abort()
        if not self._at_end.wait(_BUSY_S):
            _record(error)
            os._exit(1)


def with_hosts(
    error: WorkerError, hosts: Sequence[Sequence[int]], names: Sequence[str]
) -> WorkerError:
    """Return the error with the host of each rank, where that is named first."""
    if len(hosts) < 2:
        return error
    text = str(error)
    for host, ranks in enumerate(hosts):
        for rank in ranks:
            text = re.sub(rf"\b([Rr]ank {rank})\b", rf"\1 (host {host})", text, count=1)
    listed = ", ".join(f"host {host} is {name}" for host, name in enumerate(names))
    error.args = (f"{text}\nHosts: {listed}.",)
    return error


def print_error(text: str) -> None:
    """Write a text to stderr in one piece: the ranks of a host often share one."""
    sys.stderr.write(f"labkit: {text}\n")
    sys.stderr.flush()


def _record(error: WorkerError) -> None:
    """Give the error to torchrun, for the summary that it prints."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        try:
            # It records the traceback of the exception that is being handled.
            raise error from None
        except WorkerError:
            with contextlib.suppress(OSError):
                get_error_handler().record_exception(error)
