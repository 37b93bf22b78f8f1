"""How a started process becomes a rank: it joins the other ranks and gets its Comm."""

import atexit
import os
import tempfile
import time
from datetime import timedelta
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.comm.connections import Connection, new_connections
from labkit.comm.emulated_link import EmulatedLink, emulated_hosts, over_link, plug_in
from labkit.comm.hosts_transport import HostsTransport
from labkit.comm.meeting import find_hosts, meet, stay_on_loopback
from labkit.comm.shared_memory import Arena
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport, close_arrivals, means_loss
from labkit.comm.transport import Transport
from labkit.comm.waiting import Doorbells
from labkit.devices import Plan, num_cores
from labkit.errors import PeerLostError
from labkit.gpus import check_usable
from labkit.runtime.prepare import allow_tf32

# Ranks wait this much longer than the launcher, whose explanation says more than a timeout error.
PATIENCE_S = 30.0
_RENDEZVOUS_S = 60.0
_FOREVER = timedelta(days=365)

# The Comm that this process has last joined the others with.
_latest: list[Comm] = []
# The connections of the default process group of this process.
group_connections: list[Connection] = []
# Of the hosts of this process's latest run.
host_names: list[str] = []


def connect(
    plan: Plan,
    timeout_s: float,
    arena: Arena | None = None,
    meeting: Any = None,
    link: EmulatedLink | None = None,
) -> Comm:
    """Join the process group that the environment describes, and return this rank's Comm.

    Args:
        plan: the devices, the backend and the transport.
        timeout_s: the run's deadline, in seconds.
        arena: the launcher's memory, with a place for every rank; None under ``torchrun``.
        meeting: its ``store(world_size)`` is for the ranks; None for that of ``torchrun``.
        link: the emulated link of this process's messages; None for no emulation.

    Raises:
        ConnectionError: the other ranks cannot be reached, or one has ended meanwhile.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(plan.devices[int(os.environ["LOCAL_RANK"])])
    stay_on_loopback()
    torch.set_num_threads(max(1, num_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    allow_tf32(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_usable(device)
    if plan.backend == "nccl":
        # By default an error of NCCL kills the process, before it can say what was wrong.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    # If there is a launcher (``arena``), it enforces the deadline itself.
    group_timeout_s = max(timeout_s, _RENDEZVOUS_S) if arena else timeout_s
    if not dist.is_initialized():
        with new_connections() as opened:
            _join_group(plan.backend, group_timeout_s, device, meeting)
        group_connections[:] = opened
    group_store = dist.distributed_c10d._get_default_store()
    hosts = find_hosts(group_store, rank, world_size)
    neighbours, host_names[:] = hosts.neighbours(rank), hosts.names
    if arena is None:
        arena = meet(group_store, rank, world_size, neighbours)
    patience_s = timeout_s + PATIENCE_S
    plug_in(link, rank, arena if len(hosts.ranks) == 1 else None)
    far = TorchTransport(plan.backend, device)
    transport: Transport = far
    is_alone = len(neighbours) == 1 < world_size
    if arena and plan.transport == "shared" and device.type == "cpu" and not is_alone:
        near = SharedTransport(arena, rank, patience_s)
        one_host = len(neighbours) == world_size
        transport = near if one_host else HostsTransport(near, far, neighbours)
    bells = None
    if arena and arena.has_semaphores:
        of_near = {one: arena.doorbell(one) for one in neighbours}
        bells = Doorbells(arena.board, rank, patience_s, of_near)
    board, transport = arena.board if arena else None, over_link(transport)
    comm = Comm(rank, world_size, device, transport, board, doorbells=bells, hosts=hosts.ranks)
    # The clocks and the board are those of one host nevertheless.
    comm.hosts = emulated_hosts(range(world_size)) or hosts.ranks
    _latest[:] = [comm]
    return comm


def open_comm() -> Comm | None:
    """The Comm of the run that this process is in as a rank; None in none."""
    return next((comm for comm in _latest if not comm.session.is_closed), None)


def own_store(run: int) -> dist.Store:
    """A new connection to torchrun's store, for the watch over the ``run``-th run of this process.

    A connection serves one request at a time, and the group's may be kept busy by the ranks.
    """
    from labkit.runtime import rounds

    joined = rounds.current()
    assert joined is not None, "only torchrun's ranks are watched from within"
    store = joined.connection()
    store.set_timeout(_FOREVER)
    return dist.PrefixStore(f"watch/{run}", store)


def _join_group(
    backend: str,
    timeout_s: float,
    device: torch.device,
    meeting: Any,
) -> None:
    started_s = time.monotonic()
    rendezvous_timeout = timedelta(seconds=min(timeout_s, _RENDEZVOUS_S))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if meeting is not None:
            store: Any = meeting.store(world_size)
        else:
            # Only what torchrun has started needs it.
            from labkit.runtime import rounds

            store = rounds.join(rendezvous_timeout.total_seconds()).store
        store.set_timeout(rendezvous_timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s + PATIENCE_S),
            device_id=device if backend == "nccl" else None,
        )
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        if isinstance(error, dist.DistBackendError) and not means_loss(error):
            text = str(error).partition("\nException raised from ")[0]
            raise RuntimeError(f"rank {rank} could not start {backend}: {text}") from None
        if isinstance(error, dist.DistError) and meeting is None:
            from labkit.runtime import rounds

            raise rounds.unreachable(error, time.monotonic() - started_s) from None
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        raise PeerLostError(
            f"rank {rank} could not connect to the other ranks: one of them has ended, another "
            "program has connected to its port (then run it again), or there is no network "
            f"interface {interface!r} (GLOO_SOCKET_IFNAME). PyTorch says: {first_line}"
        ) from None
    if backend == "nccl":
        # The group must end before CUDA does. (A rank's process runs no atexit handlers.)
        Finalize(None, _leave_group, exitpriority=10)
    else:
        # Under torchrun, gloo's threads have aborted the interpreter if they still ran at its end.
        atexit.register(_leave_group)


def _leave_group() -> None:
    """Leave the group, unless the program has left it already.

    To leave it in good order waits for all that is queued. After a failure or Ctrl-C some of that
    would never end, and the peers would wait for this rank, so the group is aborted.
    """
    if not dist.is_initialized():
        return
    close_arrivals()
    if dist.get_backend() == "nccl" and open_comm() is not None:
        dist.distributed_c10d._get_default_group().abort()
    else:
        dist.destroy_process_group()


class MeetingFile:
    """The rendezvous of the ranks that one launcher starts: a file in memory, without a socket.

    PyTorch's TCPStore listens on every address of the machine, accepts messages from everybody,
    and looks up the host names of its clients. This is the file of a FileStore, and no folder
    lists it: the ranks receive it as an open file, only processes of the same user can open it,
    and it disappears with the last process that holds it, however that process ends.
    """

    def __init__(self, descriptor: int | None = None, path: str | None = None):
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if descriptor is None and path is None:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("labkit-store")
                os.fchmod(descriptor, 0o600)
            else:
                # Only Linux gives an open file a path.
                self._folder = tempfile.TemporaryDirectory(prefix="labkit-")
                path = str(Path(self._folder.name) / "store")
        self._descriptor, self._path = descriptor, path

    def __reduce__(self) -> tuple[Any, ...]:
        if self._descriptor is None:
            return MeetingFile, (None, self._path)
        return _from_duplicate, (DupFd(self._descriptor),)

    def store(self, world_size: int) -> dist.FileStore:
        """Open the store on this rank; to be called once per rank."""
        return dist.FileStore(self._path or f"/proc/self/fd/{self._descriptor}", world_size)

    def close(self) -> None:
        """Close the file, in the launcher at the end of the run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._folder:
            self._folder.cleanup()


def _from_duplicate(duplicate: Any) -> MeetingFile:
    return MeetingFile(duplicate.detach())
