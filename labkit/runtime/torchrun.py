"""``labkit.run`` in a process that ``torchrun`` has started, which is itself one of the ranks."""

import itertools
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives import all_gather
from labkit.comm.board import RETURNED, Board
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.comm.meeting import meet
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport
from labkit.devices import plan, print_once
from labkit.runtime import rounds, worker
from labkit.runtime.between_hosts import reports
from labkit.runtime.between_hosts.watch import Watch, tell
from labkit.runtime.messages import Report, dump_value
from labkit.runtime.worker import PATIENCE_S, connect, group_connections, host_names
from labkit.units import format_count

# Whether ``run_as_rank`` is calling a function in this process at the moment.
inside_a_run = False
NO_MEMORY = (
    "the ranks of this machine cannot open each other's memory through /proc/PID/fd, and labkit "
    "takes pickled results only from there: run it without torchrun"
)
_FOREVER = timedelta(days=365)
# The runs of this process so far.
_runs = itertools.count()


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
    """Run ``fn`` in this process, one of torchrun's ranks, and return all ranks' reports.

    Args:
        fn, args, world_size, device, transport, timeout_s, link, devices: see ``labkit.run``.

    Raises:
        ValueError: ``world_size`` is not the number of ranks that torchrun has started.
        ConnectionError: the other ranks cannot be reached.
        WorkerError: another rank has failed, or the ranks can never finish; says why.
        Any exception of ``fn`` on this rank.
    """
    chosen = plan(_local_world_size(world_size), device, transport, devices=devices)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_once(chosen.note)
    comm = connect(chosen, timeout_s, link=link)
    memory, watch = _report_memory(comm, timeout_s), new_watch(comm)
    try:
        if watch is not None:
            watch.also_ends(memory.session.board)
            _watching.append(watch)
            watch.start()
        dump = dump_value if len(comm.session.hosts) == 1 else reports.dump_plain
        mine = call(comm, fn, args, dump)
        return _exchange(memory, mine)
    except BaseException as error:
        raised = error if watch is None else watch.failed(error)
        if raised is error:
            raise
        tell_briefly(comm.rank)
        # The explanation names the cause; what this rank ran into is a consequence.
        raise raised from None
    finally:
        _watching.clear()
        if watch is not None:
            watch.close()


# The watch over the run that this process is in.
_watching: list[Watch] = []


def also_ends(board: Board) -> None:
    """Let a fault of this run also end the operations that wait on another board."""
    for watch in _watching:
        watch.also_ends(board)


def tell_briefly(rank: int) -> None:
    """Print no traceback for an explanation that is on stderr already, once for each host."""
    print_error = sys.excepthook

    def print_once(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if getattr(error, "is_told", False):
            tell(f"rank {rank} ends with this {kind.__name__}")
        else:
            print_error(kind, error, trace)

    sys.excepthook = print_once


def call(
    comm: Comm, fn: Callable[..., Any], args: tuple[Any, ...], dump: Callable[[Any], bytes]
) -> Report:
    """Call ``fn`` as the rank of a run; returns this rank's report.

    Args:
        dump: makes bytes of the value that ``fn`` returns.
    """
    global inside_a_run
    inside_a_run = True
    try:
        mine = worker.call(comm, fn, args, dump)
    finally:
        inside_a_run = False
    comm.session.board.ranks[comm.rank]["state"] = RETURNED
    return mine


def _local_world_size(world_size: int) -> int:
    """The number of ranks on this host.

    Raises:
        ValueError: the run does not fit the ranks that torchrun has started.
    """
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(
            f"world_size is {world_size}, but torchrun started {format_count(started, 'rank')}: "
            f"use world_size={started}, or another --nproc-per-node"
        )
    return int(os.environ["LOCAL_WORLD_SIZE"])


def new_watch(comm: Comm) -> Watch | None:
    """The watch over this run; None where a rank cannot see how the others of its host are."""
    if not sys.platform.startswith("linux"):
        return None
    run, board, hosts = next(_runs), comm.session.board, comm.session.hosts
    return Watch(
        comm.rank,
        board,
        next(ranks for ranks in hosts if comm.rank in ranks),
        hosts,
        host_names,
        (lambda: _own_store(run)) if len(hosts) > 1 else None,
        f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
        group_connections,
        lambda: dist.distributed_c10d._get_default_group().abort(),
    )


def _own_store(run: int) -> dist.Store:
    """A new connection to torchrun's store: the group's may be kept busy by the ranks."""
    joined = rounds.current()
    assert joined is not None, "only torchrun's ranks are watched from within"
    store = joined.connection()
    store.set_timeout(_FOREVER)
    return dist.PrefixStore(f"watch/{run}", store)


def _report_memory(comm: Comm, timeout_s: float) -> Comm:
    """A Comm to exchange reports with.

    Reports of one host are pickles, and a pickle can make its reader run any code: they travel
    through memory that only this user's processes can open. gloo takes its addresses from the
    store, and its sockets do not check who connects: the reports of several hosts are plain data.

    Raises:
        ConnectionError: the ranks of one machine cannot open the memory, though the system has it.
    """
    arena = None
    if sys.platform.startswith("linux"):
        store = dist.distributed_c10d._get_default_store()
        neighbours = next(ranks for ranks in comm.session.hosts if comm.rank in ranks)
        if (arena := meet(store, comm.rank, comm.world_size, neighbours)) is None:
            raise ConnectionError(NO_MEMORY)
    if arena is None or len(comm.session.hosts) > 1:
        moved = comm.device if dist.get_backend() == "nccl" else torch.device("cpu")
        return Comm(comm.rank, comm.world_size, moved, TorchTransport(dist.get_backend(), moved))
    transport = SharedTransport(arena, comm.rank, timeout_s + PATIENCE_S)
    return Comm(comm.rank, comm.world_size, torch.device("cpu"), transport)


def _exchange(comm: Comm, mine: Report) -> list[Report]:
    """The reports of all ranks, in rank order."""
    if comm.transport.shares_memory:
        return [pickle.loads(packed) for packed in _gather_bytes(comm, pickle.dumps(mine))]
    packed = _gather_bytes(comm, reports.to_bytes(mine))
    return [reports.from_bytes(data, rank) for rank, data in enumerate(packed)]


def _gather_bytes(comm: Comm, mine: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order."""
    lengths = [int(one) for one in all_gather(comm, torch.tensor(len(mine), device=comm.device))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = all_gather(comm, padded.to(comm.device))
    return [bytes(data[:length].cpu().numpy()) for data, length in zip(everyone, lengths)]
