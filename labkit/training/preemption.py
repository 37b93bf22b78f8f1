"""SIGTERM under torchrun: all ranks end after the same step, with a checkpoint.

torchrun sends it to all of its ranks when it is told to end itself (by Slurm, or by a cloud that
takes the machine back), and when a machine joins or is lost. The ranks need no message per step
for this: each counts the step that it is in, and when one is told to end, all publish these
numbers in the store. None begins a step beyond the largest of them, after which all save.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

from labkit.comm.comm import Comm
from labkit.comm.processes import is_running
from labkit.errors import PreemptedError
from labkit.runtime import rounds

_POLL_S = 0.2
# How long the ranks may take to publish their numbers. One whose machine is gone never does.
_PATIENCE_S = 8.0
# How long the watch over the ranks may take to say which of them is gone, and to end this one.
_EXPLAINED_S = 5.0
_STOP, _FAILED = "stop", -1
_SIGNAL, _AGENT = "SIGTERM", "the end of a torchrun whose ranks were left"
STATUS = 128 + signal.SIGTERM


class Preemption:
    """Lets the ranks of a run end together, on one rank; as a context manager, while it trains.

    Args:
        comm: of this rank.
        saves: whether the run has checkpoints. Without them, and without torchrun, SIGTERM ends
            this process as ever.

    A rank whose agent has ended ends, too: nobody could end it or start it anew.

    Attributes:
        reason: what has ended the run, once ``ends_after`` says that it ends.
    """

    def __init__(self, comm: Comm, saves: bool):
        self._comm, self.reason, self._agent = comm, _SIGNAL, os.getppid()
        can_handle = threading.current_thread() is threading.main_thread()
        self._round = rounds.current() if saves and can_handle else None
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_frozen = self._is_told = self._is_closed = False
        # The step after which all ranks end, once it is known; _FAILED if they cannot agree.
        self._last: int | None = None

    def __enter__(self) -> "Preemption":
        if self._round is not None:
            self._store = self._round.connection()
            self._ends = socket.socketpair()
            for end in self._ends:
                end.setblocking(False)
            # The handler of Python runs between two lines, and this rank may be in a long wait.
            self._wakeup = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
            self._handler = signal.signal(signal.SIGTERM, _ignore)
            self._thread = threading.Thread(
                target=self._watch, name="labkit-preemption", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._round is None:
            return
        self._is_closed = True
        self._ends[1].send(b"\0")
        self._thread.join()
        if kind is not None and not issubclass(kind, PreemptedError):
            self._publish(_FAILED)
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGTERM, self._handler)
        for end in self._ends:
            end.close()

    def begin(self, step: int) -> None:
        """Say that ``step`` steps are done, and that the training begins. Before, there is nothing
        to be saved, and SIGTERM ends this process at once."""
        with self._changed:
            self._under_way = step + 1

    def ends_after(self, step: int) -> bool:
        """Whether the run ends after ``step`` steps, of all epochs; if not, the next one begins.

        Raises:
            PreemptedError: the ranks cannot agree, because one of them is gone.
        """
        if self._round is None:
            return False
        with self._changed:
            while self._is_frozen and self._last is None:
                self._changed.wait()
            if self._last == _FAILED:
                raise PreemptedError("stopped by SIGTERM, without a checkpoint: a rank is gone")
            if self._last is not None and step >= self._last:
                return True
            self._under_way = step + 1
            return False

    def _watch(self) -> None:
        """The thread: wait for the signal, for the word of another rank, and for the agent."""
        while not self._is_closed:
            try:
                if self._hears():
                    self._store.set(_STOP, _SIGNAL if os.getppid() == self._agent else _AGENT)
                elif not self._store.check([_STOP]):
                    continue
            except RuntimeError:
                # The store is gone: torchrun has ended, or the machine that had it.
                if not self._is_told:
                    continue
            self._agree()
            return

    def _hears(self) -> bool:
        """Whether this rank is to end; after a moment, if nothing says so."""
        if not self._is_told and select.select([self._ends[0]], [], [], _POLL_S)[0]:
            self._is_told = signal.SIGTERM in self._ends[0].recv(4096)
        self._is_told |= os.getppid() != self._agent
        return self._is_told

    def _agree(self) -> None:
        """Publish the step under way, and set the last one when all ranks have done so."""
        with self._changed:
            self._is_frozen = True
            has_begun = self._under_way > 0
        self._publish(self._under_way if has_begun else _FAILED)
        last = self._largest() if has_begun else _FAILED
        with self._changed:
            self._last = last
            self._changed.notify_all()
        # Its peers are gone, and it may wait for them where nothing else ends it.
        while last == _FAILED and not self._is_closed:
            if self._hears() and not (has_begun and self._ends_itself()):
                os._exit(STATUS)

    def _publish(self, step: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_STOP}/{self._comm.rank}", str(step))

    def _largest(self) -> int:
        assert self._round is not None
        keys = [f"{_STOP}/{rank}" for rank in range(self._comm.world_size)]
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s and not (self._is_closed or self._has_lost()):
            try:
                if self._store.check(keys):
                    steps = [int(self._store.get(key)) for key in keys]
                    self.reason = _AGENT if self._store.get(_STOP) == _AGENT.encode() else _SIGNAL
                    return _FAILED if _FAILED in steps else max(steps)
            except (RuntimeError, ValueError):
                return _FAILED
            time.sleep(_POLL_S / 10)
        return _FAILED

    def _has_lost(self) -> bool:
        """Whether a rank of this machine has ended."""
        pids = self._comm.session.board.ranks["pid"]
        return any(pid and not is_running(int(pid)) for pid in pids)

    def _ends_itself(self) -> bool:
        until_s = time.monotonic() + _EXPLAINED_S
        while time.monotonic() < until_s and not self._is_closed:
            time.sleep(_POLL_S / 10)
        return self._is_closed


def _ignore(number: int, frame: FrameType | None) -> Any:
    """What the signal asks for is done by the thread."""
