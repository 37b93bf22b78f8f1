"""The process of a rank, from start to end: it joins the others, calls the function, reports."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from numpy import random as numpy_random  # numpy would load it late, in every rank

from labkit.engine import gpus
from labkit.engine.comm.board import RETURNED, RUNNING
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import EmulatedLink, over_link, plug_in
from labkit.engine.comm.rendezvous import HostsTransport, find_hosts, map_arena, stay_on_loopback
from labkit.engine.comm.shared_memory import Arena
from labkit.engine.comm.shared_transport import SharedTransport
from labkit.engine.comm.source_lines import install_sources
from labkit.engine.comm.torch_transport import (
    TorchTransport,
    close_arrivals,
    connections,
    keep_alive,
)
from labkit.engine.comm.transport import Transport
from labkit.engine.devices import Plan, num_cores
from labkit.engine.errors import PeerLostError
from labkit.engine.runtime.failures import reached_limit, report_of_failure
from labkit.engine.runtime.messages import Report, dump_value
from labkit.engine.started import MARK, read_numbers
from labkit.schedules.ring import host_of

# The launcher writes it to let a rank exit.
GO = b"g"
# Ranks wait this much longer than the launcher, whose explanation says more than a timeout error.
PATIENCE_S = 30.0
_RENDEZVOUS_S = 60.0
# With more ranks gloo connects two of them when they first talk to each other. (It would connect
# every pair at the start, and most never talk over it. A peer that has ended is then noticed late,
# but a launcher notices it, too.)
_MOST_CONNECTED = 16

# The Comm that this process has last joined the others with.
_latest: list[Comm] = []
# First lines of the errors with which runs of this process have failed.
failures: list[str] = []
# The connections of the default process group of this process.
group_connections: set[Any] = set()
# The names of the hosts of this process's latest run.
host_names: list[str] = []


@dataclass(frozen=True)
class Job:
    """A launcher's order to every rank: ``call`` is the function with its arguments, see
    ``messages.dump_call``, and ``sources`` are the caller's notebook cells, for tracebacks."""

    call: bytes
    sources: dict[str, list[str]]
    plan: Plan
    world_size: int
    timeout_s: float
    may_lose: frozenset[int] = frozenset()
    link: EmulatedLink | None = None


def run_rank(
    environment: dict[str, str],
    control: socket.socket,
    output: Connection,
    job: Job,
    arena: Arena,
    store_path: str,
) -> None:
    """Be a rank's process: ``control`` carries its report and the launcher's answer."""
    os.environ.clear()
    os.environ.update(environment)
    rank = int(environment["RANK"])
    pid = os.getpid()
    # A separate process group, so that processes which this rank starts can be ended with it.
    os.setpgid(0, 0)
    may_exit = threading.Event()
    # Ctrl-C and the stop button signal the whole process group; the launcher ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # All that Python or C writes goes to the launcher.
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
        os.dup2(output.fileno(), stream.fileno())
    output.close()
    # A C-level handler: it answers even while the main thread is stuck in a native call.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    arena.board.ranks[rank]["pid"] = pid
    if sys.platform.startswith("linux"):
        # A DataLoader's workers are forks of this rank, as in any program on Linux. From the
        # forkserver they would have to unpickle the data set, and to import torch, each epoch.
        multiprocessing.set_start_method("fork", force=True)
    # A rank has no notebook that shows figures.
    os.environ["MPLBACKEND"] = "agg"
    if "matplotlib" in sys.modules:
        sys.modules["matplotlib"].rcParams["backend"] = "agg"
    try:
        _watch_launcher(control, may_exit)
        install_sources(job.sources)
        function, args = cloudpickle.loads(job.call)
        comm = connect(job.plan, job.timeout_s, arena, store_path, job.link)
        report = call(comm, function, args, dump_value)
    except BaseException as error:
        report = report_of_failure(rank, error)
    # The function may have replaced a stream by an object that cannot be flushed.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if os.getpid() != pid:
        # A child that the function has forked gets here, too; only the rank itself reports.
        os._exit(0)
    # Without a copy of a large value.
    with control.makefile("wb") as file:
        pickle.dump(report, file)
    control.shutdown(socket.SHUT_WR)
    if report.kind != "value" and rank in job.may_lose:
        # The other ranks notice that this one has ended, and continue.
        os._exit(1)
    # Exiting now would break connections of ranks that are still running.
    may_exit.wait()


def call(
    comm: Comm, fn: Callable[..., Any], args: tuple[Any, ...], dump: Callable[[Any], bytes]
) -> Report:
    """Call ``fn`` as a rank; return its report, with the value as ``dump`` writes it."""
    comm.session.board.ranks[comm.rank]["state"] = RUNNING
    seed_random_numbers(comm.rank)
    comm.session.start_together()
    started_s = time.perf_counter()
    value = fn(comm, *args)
    gpus.synchronize(comm.device)
    duration_s = time.perf_counter() - started_s
    peak_memory = comm.session.memory.total()
    payload = dump(value)
    comm.session.close()
    comm.session.board.ranks[comm.rank]["state"] = RETURNED
    device = str(comm.device)
    numbers = read_numbers()
    if (numbers.local_world_size or comm.world_size) < comm.world_size:
        # Each machine has a ``cuda:0``.
        device += f" of machine {numbers.host}"
    return Report(
        comm.rank,
        "value",
        payload,
        spans=tuple(comm.session.spans()),
        messages=comm.messages,
        bytes_sent=comm.bytes_sent,
        device=device,
        peak_memory=peak_memory,
        duration_s=duration_s,
    )


def _watch_launcher(control: socket.socket, may_exit: threading.Event) -> None:
    """Set ``may_exit`` once this rank may exit; if the launcher is killed, the rank ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    launcher = parent.sentinel

    def watch() -> None:
        with contextlib.suppress(OSError):
            # (A child that the launcher has forked may hold its socket open.)
            if control in wait([control, launcher]) and control.recv(1) == GO:
                may_exit.set()
                wait([launcher])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="labkit-launcher-watch", daemon=True).start()


def seed_random_numbers(rank: int) -> None:
    """Let each rank draw other numbers, and the same from run to run.

    With ``rank`` itself as the seed, a rank would draw those of a caller that has seeded with 0.
    """
    for_python, for_numpy, for_torch = numpy_random.SeedSequence(rank).generate_state(3)
    random.seed(int(for_python))
    numpy_random.seed(int(for_numpy))
    # For GPUs that may come PyTorch keeps a traceback, which takes milliseconds.
    seed = torch.manual_seed if gpus.may_exist() else torch.default_generator.manual_seed
    seed(int(for_torch))


def allow_tf32(allowed: bool) -> None:
    """Let this process's GPUs round the factors of float32 products to TF32's 10 bits, or not.

    cuDNN's convolutions do by default. Runs that are compared need all 23 bits.
    """
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    # PyTorch has an old switch and a new one, and reading the old one is an error if they differ.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions warn of the old one
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    precision = "tf32" if allowed else "ieee"
    for operation in (cuda.matmul, cudnn.conv, cudnn.rnn):
        operation.fp32_precision = precision


def connect(
    plan: Plan,
    timeout_s: float,
    arena: Arena | None = None,
    rendezvous: Any = None,
    link: EmulatedLink | None = None,
) -> Comm:
    """Join the process group that the environment describes, and return this rank's Comm.

    ``arena`` is the launcher's memory, with a slot for every rank (None without a launcher);
    ``rendezvous`` a file, or an object with a ``store(world_size)``, or None for a launcher's; its
    ranks have joined (``rounds.join``).
    """
    numbers = read_numbers()
    rank, world_size = numbers.rank, numbers.world_size
    assert rank is not None
    assert world_size is not None
    device = torch.device(plan.devices[numbers.local_rank or 0])
    stay_on_loopback()
    torch.set_num_threads(max(1, num_cores() // (numbers.local_world_size or world_size)))
    allow_tf32(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        gpus.check_usable(device)
    if plan.backend == "nccl":
        # By default an error of NCCL kills the process, before it can say what was wrong.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if arena and world_size > _MOST_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if not dist.is_initialized():
        # If there is a launcher (``arena``), it enforces the deadline itself.
        group_timeout_s = max(timeout_s, _RENDEZVOUS_S) if arena else timeout_s
        # A launcher sees the end of a rank; without one the connections have to show it. (To list
        # them the system goes through those of all processes.)
        before = set() if arena else connections()
        _join_group(rank, world_size, plan.backend, group_timeout_s, device, rendezvous)
        if arena is None:
            group_connections.update(connections() - before)
            keep_alive(group_connections)
    group_store = dist.distributed_c10d._get_default_store()
    hosts, host_names[:] = find_hosts(group_store, rank, world_size)
    neighbors = hosts[host_of(rank, hosts)]
    if arena is None:
        arena = map_arena(group_store, rank, world_size, neighbors)
    plug_in(link, rank, arena if len(hosts) == 1 else None)
    between_hosts = TorchTransport(plan.backend, device)
    transport: Transport = between_hosts
    if arena and plan.transport == "shared":
        on_host = SharedTransport(arena, rank, timeout_s + PATIENCE_S)
        if len(neighbors) == world_size:
            transport = on_host
        elif len(neighbors) > 1:
            transport = HostsTransport(on_host, between_hosts, neighbors)
    board = arena.board if arena else None
    comm = over_link(Comm(rank, world_size, device, transport, board, hosts=hosts))
    _latest[:] = [comm]
    os.environ.setdefault(MARK, str(os.getpid()))
    return comm


def open_comm() -> Comm | None:
    """The Comm of the run that this process is in as a rank; None in none."""
    return next((comm for comm in _latest if not comm.session.is_closed), None)


def _join_group(
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    device: torch.device,
    rendezvous: Any,
) -> None:
    started_s = time.monotonic()
    patience = timedelta(seconds=min(timeout_s, _RENDEZVOUS_S))
    try:
        if isinstance(rendezvous, str):
            store: Any = dist.FileStore(rendezvous, world_size)
        elif rendezvous is not None:
            store = rendezvous.store(world_size)
        else:
            # Only what a launcher has started needs it.
            from labkit.engine.runtime import rounds

            store = rounds.join(timeout_s).store
        store.set_timeout(patience)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s + PATIENCE_S),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        if isinstance(error, dist.DistError) and rendezvous is None:
            from labkit.engine.runtime import rounds

            raise rounds.unreachable(error, time.monotonic() - started_s) from None
        message = str(error).partition("\nException raised from ")[0]
        text = f"rank {rank} could not connect to the other ranks. PyTorch says: {message}. "
        limit = reached_limit(error)
        if limit:
            raise OSError(text + limit) from None
        raise PeerLostError(
            f"{text}Perhaps one of them has ended, or GLOO_SOCKET_IFNAME="
            f"{os.environ.get('GLOO_SOCKET_IFNAME', '')} is no interface of this machine"
        ) from None
    if backend == "nccl":
        # The group must end before CUDA does. (A rank's process runs no atexit handlers.)
        Finalize(None, _leave_group, exitpriority=10)
    else:
        # Under torchrun, gloo's threads have aborted the interpreter if they still ran at its end.
        atexit.register(_leave_group)


def _leave_group() -> None:
    """Leave the group; after a failure, what is queued for NCCL would never end."""
    if not dist.is_initialized():
        return
    close_arrivals()
    if dist.get_backend() == "nccl" and (failures or open_comm() is not None):
        dist.distributed_c10d._get_default_group().abort()
    else:
        dist.destroy_process_group()
