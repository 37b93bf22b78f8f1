"""This process is a rank that a launcher has started: ``labkit.run`` in it, and plain scripts.

The launcher is ``torchrun``, or another that sets its variables (``labkit.engine.started``).

``labkit.run`` calls its function here, and exchanges what the ranks return. A script without it
whose library has its own thread (``labkit.horovod``) gets a ``Comm`` by ``open_for``.
"""

import atexit
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.engine.comm.board import RUNNING
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.comm.rendezvous import separate_comm
from labkit.engine.comm.shared_memory import Arena
from labkit.engine.comm.shared_transport import SharedTransport
from labkit.engine.comm.torch_transport import TorchTransport
from labkit.engine.devices import plan, print_once
from labkit.engine.runtime import rounds
from labkit.engine.runtime.messages import Report
from labkit.engine.runtime.plain import dump_plain, dump_report, load_report
from labkit.engine.runtime.rank_watch import Watch
from labkit.engine.runtime.worker import call, connect, failures, open_comm
from labkit.engine.started import read_numbers, started_as_rank
from labkit.schedules.ring import host_of
from labkit.units import MOST_SECONDS, format_count

# The runs of this process so far, and the Comms that it has opened for threads.
_runs = itertools.count()
_opened = itertools.count()
_FOREVER = timedelta(days=365)


def run_as_rank(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    device: str,
    transport: str,
    timeout_s: float,
    link: EmulatedLink | None = None,
    devices: str | Sequence[str] | None = None,
) -> list[Report]:
    """Run ``fn`` in this process, one of a launcher's ranks (see ``labkit.run``); all reports.

    An exception of ``fn`` on this rank is raised as it is; WorkerError says how another failed.
    """
    started = started_as_rank()
    assert started is not None
    count = started.world_size
    if world_size != count:
        raise ValueError(
            f"world_size is {world_size}, but {started.launcher} has started "
            f"{format_count(count, 'rank')}: use world_size={count}, or start as many"
        )
    if failures:
        raise ValueError(
            "an earlier run of this process has failed, and the connections between the ranks "
            f"ended with it: start the ranks anew. The failure: {failures[0]}"
        )
    rounds.join(timeout_s)
    numbers = read_numbers()
    chosen = plan(numbers.local_world_size or count, device, transport, devices=devices)
    if numbers.local_rank == 0:
        print_once(chosen.note)
    comm = connect(chosen, timeout_s, link=link)
    with watched(Watch(comm, _own_store(next(_runs)))):
        return _exchange(comm, call(comm, fn, args, dump_plain))


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within the block the run is watched, and an error becomes the one that explains the run."""
    watch.start()
    try:
        yield
    except BaseException as error:
        raised = watch.failed(error)
        failures.append(str(raised).partition("\n")[0] or type(raised).__name__)
        if raised is error:
            raise
        # The explanation names the cause; what this rank ran into is a consequence.
        raise raised from None
    finally:
        watch.close()
        comm = open_comm()
        if comm is not None:
            comm.session.close()


def _own_store(run: int) -> dist.Store:
    """A new connection to the ranks' store: the group's may be kept busy by the ranks."""
    # The rank has joined already.
    store = rounds.join(0.0).store.clone()
    store.set_timeout(_FOREVER)
    return dist.PrefixStore(f"watch/{run}", store)


def _exchange(comm: Comm, own_report: Report) -> list[Report]:
    """The reports of all ranks, in rank order; plain data, whoever has sent it."""
    backend = dist.get_backend()
    device = comm.device if backend == "nccl" else torch.device("cpu")
    comm = Comm(comm.rank, comm.world_size, device, TorchTransport(backend, device))
    own_data = torch.frombuffer(bytearray(dump_report(own_report)), dtype=torch.uint8).to(device)
    own_length = torch.tensor([len(own_data)], device=device)
    data_of = {comm.rank: own_data}
    for step in range(1, comm.world_size):
        to = (comm.rank + step) % comm.world_size
        source = (comm.rank - step) % comm.world_size
        length = torch.empty_like(own_length)
        comm.exchange(own_length, to, length, source)
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
        comm.exchange(own_data, to, data, source)
        data_of[source] = data
    return [load_report(bytes(data_of[rank].cpu().numpy()), rank) for rank in sorted(data_of)]


# For a library with its own thread


class Opened:
    """A ``Comm`` for one thread, on the CPU, as ``open_for`` has opened it.

    Attributes:
        local_rank, local_size: this rank among those of its host, and their number.
    """

    def __init__(self, comm: Comm, at_end: Callable[[], None], watch: Watch | None = None):
        # A thread that is inside PyTorch when the interpreter ends would abort the process.
        atexit.register(at_end)
        self.comm = comm
        hosts = comm.session.hosts
        neighbors = hosts[host_of(comm.rank, hosts)]
        self.local_rank = neighbors.index(comm.rank)
        self.local_size = len(neighbors)
        self._watch = watch
        self._pid = os.getpid()
        self._print_error = sys.excepthook
        if watch is not None:
            sys.excepthook = self._end_with
            watch.start()

    def _end_with(self, kind: object, error: BaseException, trace: object) -> None:
        """Report an error that ends this script to the other ranks, and print the explanation."""
        sys.excepthook = self._print_error
        if self._watch is not None and self.is_mine():
            error = self._watch.failed(error)
        sys.excepthook(type(error), error, error.__traceback__)

    def is_mine(self) -> bool:
        """True if this process has opened it, and not one that it was forked from."""
        return os.getpid() == self._pid

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

    Inside ``labkit.run`` the ranks meet once more. A script that a launcher has started joins the
    others, and is watched from then on. Without a launcher the program is the only rank.

    Args:
        purpose: of this thread, one word.
        comm: of the run that this rank is in; None to find it.
        at_end: called before the run or the program ends, to end the thread.
    """
    comm = comm or open_comm()
    if comm is not None:
        comm.session.at_close.append(at_end)
    if comm is not None and comm.world_size > 1:
        name = f"{purpose}/{next(_opened)}"
        store = dist.distributed_c10d._get_default_store()
        return Opened(separate_comm(name, store, comm.rank, comm.world_size, _FOREVER), at_end)
    started = None if comm is not None else started_as_rank()
    if started is not None:
        rounds.join(MOST_SECONDS)
        local_world_size = read_numbers().local_world_size or started.world_size
        script_comm = connect(plan(local_world_size, "cpu", "auto"), MOST_SECONDS)
        script_comm.session.board.ranks[script_comm.rank]["state"] = RUNNING
        return Opened(script_comm, at_end, Watch(script_comm, _own_store(next(_runs))))
    arena = Arena(1)
    transport = SharedTransport(arena, 0, math.inf)
    return Opened(Comm(0, 1, torch.device("cpu"), transport, arena.board), at_end)
