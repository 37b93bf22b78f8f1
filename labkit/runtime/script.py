"""A ``Comm`` for a library with a thread of its own, however the program was started.

Inside ``labkit.run`` the rank has a ``Comm``, whose messages must not mix with those of another
thread: the ranks meet once more. A script that torchrun has started has none yet: its rank joins
the others, and from then on ``Watch`` explains lost ranks, as it does inside ``labkit.run``.
Without a launcher the program is the only rank.
"""

import atexit
import itertools
import math
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from labkit.comm.board import RUNNING
from labkit.comm.comm import Comm
from labkit.comm.separate import separate_comm
from labkit.comm.shared_memory import Arena
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport
from labkit.devices import plan
from labkit.runtime import torchrun
from labkit.runtime.between_hosts.reports import dump_plain, load_plain
from labkit.runtime.between_hosts.watch import Watch
from labkit.runtime.messages import dump_value
from labkit.runtime.preload import under_torchrun
from labkit.runtime.worker import connect, open_comm
from labkit.units import MOST_SECONDS

_numbers = itertools.count()


class Opened:
    """What ``open_for`` has opened.

    Attributes:
        comm: for one thread, on the CPU.
        hosts, host: the ranks of each host, and the number of this one.
        local_rank, local_size: this rank among those of its host, and how many these are.
        has_failed: whether the script ends with an error.
    """

    def __init__(self, comm: Comm, watch: Watch | None = None):
        self.comm, self.has_failed = comm, False
        self.hosts = comm.session.hosts
        self.host = next(n for n, ranks in enumerate(self.hosts) if comm.rank in ranks)
        neighbours = self.hosts[self.host]
        self.local_rank, self.local_size = neighbours.index(comm.rank), len(neighbours)
        self._watch = watch
        self._pid = os.getpid()
        self._print_error = sys.excepthook
        if watch is not None:
            sys.excepthook = self._end_with

    def _end_with(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Tell the other ranks of an error that ends this script, and print what explains it."""
        sys.excepthook = self._print_error
        self.has_failed = True
        raised = error
        if self._watch is not None and self.is_mine():
            raised = self._watch.failed(error)
        if raised is error:
            self._print_error(kind, error, trace)
        else:
            torchrun.tell_briefly(self.comm.rank)
            sys.excepthook(type(raised), raised, raised.__traceback__)

    def is_mine(self) -> bool:
        """Whether this process has opened it, and not one that it was forked from."""
        return os.getpid() == self._pid

    def dump(self, value: Any) -> bytes:
        """The bytes of any value that can be pickled; between hosts, of plain data."""
        return dump_value(value) if len(self.hosts) == 1 else dump_plain(value)

    def load(self, data: bytes) -> Any:
        """A value that a rank has dumped.

        A pickle can run any code: between ranks of one host it travels through memory that only
        this user's processes can open, and between hosts there are none.
        """
        if len(self.hosts) > 1:
            return load_plain(data)
        if self.comm.transport.shares_memory or self.comm.world_size == 1:
            return pickle.loads(data)
        raise ConnectionError(torchrun.NO_MEMORY)

    def close(self) -> None:
        """Leave the other ranks; a script's rank does so at its end at the latest."""
        if self._watch is not None:
            sys.excepthook = self._print_error
            self._watch.close()
            self._watch = None
        if not self.comm.session.is_closed:
            self.comm.session.leave()


def open_for(purpose: str, comm: Comm | None, at_end: Callable[[], None]) -> Opened:
    """Open a Comm of all ranks for one thread; all of them call this, as often.

    Args:
        purpose: of this thread, one word.
        comm: of the run that this rank is in; None to find it.
        at_end: called before the run or the program ends, to end the thread.

    Raises:
        ConnectionError: the other ranks cannot be reached.
    """
    if (run := comm or open_comm()) is not None:
        opened = Opened(_beside(run, purpose))
        run.session.at_close.append(at_end)
    elif under_torchrun():
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        mine = connect(plan(local, "cpu", "auto"), MOST_SECONDS)
        watch = torchrun.new_watch(mine)
        opened = Opened(mine, watch)
        mine.session.board.ranks[mine.rank]["state"] = RUNNING
        if watch is not None:
            watch.start()
    else:
        opened = Opened(_alone())
    # A thread that is inside PyTorch when the interpreter ends would abort the process.
    atexit.register(at_end)
    return opened


def _beside(run: Comm, purpose: str) -> Comm:
    if run.world_size == 1:
        return _alone()
    store = dist.distributed_c10d._get_default_store()
    forever = timedelta(days=365)
    where = f"{purpose}/{next(_numbers)}"
    comm = separate_comm(where, store, run.rank, run.world_size, forever)
    torchrun.also_ends(comm.session.board)
    return comm


def _alone() -> Comm:
    cpu = torch.device("cpu")
    if not sys.platform.startswith("linux"):
        return Comm(0, 1, cpu, TorchTransport("gloo", cpu))
    arena = Arena(1)
    return Comm(0, 1, cpu, SharedTransport(arena, 0, math.inf), arena.board)
