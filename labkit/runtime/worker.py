"""Inside one rank: from a started process to a finished function.

The launcher starts ``run_rank`` in every process. Under ``torchrun`` there is no launcher of ours;
``connect`` alone then turns the process into a rank.
"""

import atexit
import contextlib
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from labkit.collectives import all_gather
from labkit.comm.board import RETURNED, RUNNING
from labkit.comm.comm import Comm
from labkit.comm.cuda_ipc import CudaTransport
from labkit.comm.doorbells import Doorbells
from labkit.comm.meeting import meet, stay_on_loopback
from labkit.comm.shared_memory import Arena
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.source_lines import install_sources, is_internal, is_ours
from labkit.comm.torch_transport import TorchTransport
from labkit.devices import Plan, num_cores, plan
from labkit.errors import MismatchError, PeerLostError
from labkit.runtime.file_store import MeetingFile
from labkit.runtime.messages import Report, described, may_go, send_report, shortened
from labkit.units import format_count

# What the launcher must outlast, so that its explanation comes before gloo's own timeout.
_PATIENCE_S = 30.0
_RENDEZVOUS_S = 60.0
# How far a value that cannot travel is looked into.
_DEEPEST = 20

inside_a_run = False


@dataclass(frozen=True)
class Job:
    """What the launcher hands to every rank of one machine."""

    function: bytes
    sources: dict[str, list[str]]
    plan: Plan
    timeout_s: float
    may_lose: frozenset[int] = frozenset()


def run_rank(
    rank: int,
    environment: dict[str, str],
    control: Connection,
    output: Connection,
    job: Job,
    arena: Arena,
    meeting: MeetingFile,
) -> None:
    """The body of a rank's process: connect, call the function, report, wait to be let go."""
    os.environ.update(environment)
    # What this rank starts is ended with it.
    os.setpgid(0, 0)
    me = arena.board.ranks[rank]["pid"] = os.getpid()
    let_go = _watch_launcher(control)
    # Ctrl-C and the stop button signal the whole process group; ending ranks is the launcher's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _capture_output(output)
    report = _call(job, rank, arena, meeting)
    _flush()
    if os.getpid() != me:
        # A process that the function has forked is no rank, and has nothing to report.
        os._exit(0)
    send_report(control, report)
    if report.kind != "value" and rank in job.may_lose:
        # The others are to find out by themselves, and go on.
        os._exit(1)
    # Leaving now would break the connections of ranks that are still fine, and after a failure
    # bury the cause under theirs. The launcher lets this process go, or ends it.
    let_go.wait()


def connect(
    plan: Plan,
    timeout_s: float,
    arena: Arena | None = None,
    meeting: MeetingFile | None = None,
) -> Comm:
    """Join the process group that the environment describes, and return this rank's Comm.

    The ranks find each other in ``meeting``, or by the environment's address (``torchrun``).
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    stay_on_loopback()
    torch.set_num_threads(max(1, num_cores() // local_world_size))
    device = torch.device(plan.devices[int(os.environ["LOCAL_RANK"])])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # A launcher watches the deadline itself, and says more than a rank could.
        patience_s = max(timeout_s, _RENDEZVOUS_S) if arena else timeout_s
        store = meeting and meeting.store(world_size)
        _join_group(plan.backend, patience_s, device, store)
    if arena is None and local_world_size == world_size:
        arena = meet(dist.distributed_c10d._get_default_store(), rank, world_size)
    if arena is not None and plan.transport == "shared":
        # The launcher ends a run that stands still; under torchrun nobody else looks.
        patience_s = timeout_s + _PATIENCE_S
        if device.type == "cuda":
            transport = CudaTransport(arena, rank, device, timeout_s=patience_s)
        else:
            transport = SharedTransport(arena, rank, patience_s)
    else:
        transport = TorchTransport(plan.backend, device)
    if arena is None:
        return Comm(rank, world_size, device, transport)
    doorbells = Doorbells(arena, rank, timeout_s + _PATIENCE_S) if arena.has_semaphores else None
    return Comm(rank, world_size, device, transport, arena.board, doorbells=doorbells)


def _join_group(
    backend: str, timeout_s: float, device: torch.device, store: dist.Store | None
) -> None:
    started_s = time.monotonic()
    patience = timedelta(seconds=min(timeout_s, _RENDEZVOUS_S))
    try:
        if store is None:
            store, *_ = next(dist.rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        dist.init_process_group(
            backend,
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout_s + _PATIENCE_S),
            device_id=device if backend == "nccl" else None,
        )
        if backend == "nccl":
            # It must go before CUDA does. A worker process runs these, and no atexit handlers.
            Finalize(None, dist.destroy_process_group, exitpriority=10)
        else:
            # Under torchrun: gloo's threads, left to the interpreter's end, were seen to abort it.
            atexit.register(_leave_group)
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        waited_s = time.monotonic() - started_s
        raise ConnectionError(
            f"rank {os.environ['RANK']} could not join the others at {where} in {waited_s:.0f} s: "
            "check that rank 0 runs there and that no firewall is between "
            f"({str(error).splitlines()[0]})"
        ) from None
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        raise PeerLostError(
            f"rank {os.environ['RANK']} could not connect to the other ranks: one of them has "
            "ended, another program has connected to its port (then run it again), or there is no "
            f"network interface {interface!r} (GLOO_SOCKET_IFNAME). PyTorch says: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(job: Job, rank: int, arena: Arena, meeting: MeetingFile) -> Report:
    global inside_a_run
    inside_a_run = True
    try:
        install_sources(job.sources)
        function, args = cloudpickle.loads(job.function)
        comm = connect(job.plan, job.timeout_s, arena, meeting)
        arena.board.ranks[rank]["state"] = RUNNING
        comm.session.start_together()
        started_s = time.perf_counter()
        value = function(comm, *args)
        duration_s = time.perf_counter() - started_s
        report = _success(comm, dump_value(value), duration_s)
    except BaseException as error:
        return _failure(rank, error)
    arena.board.ranks[rank]["state"] = RETURNED
    return report


def _success(comm: Comm, payload: bytes, duration_s: float) -> Report:
    comm.session.close()
    counts = comm.messages, comm.bytes_sent
    spans = tuple(comm.session.spans())
    return Report(comm.rank, "value", payload, spans, *counts, duration_s=duration_s)


def dump_value(value: Any) -> bytes:
    """Pickle a rank's result, its tensors on the CPU (the launcher must never initialise CUDA).

    Raises:
        UnpicklableError: names the part that cannot travel.
    """
    try:
        value = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
        return cloudpickle.dumps(value)
    except (Exception, SystemExit) as error:
        raise UnpicklableError(
            f"{offender('value', value)} cannot be pickled ({described(error)}). "
            "Return tensors, numbers, or containers of them"
        ) from None


class UnpicklableError(ValueError):
    """A function, an argument or a result cannot travel between processes."""


def offender(name: str, value: Any, depth: int = 0) -> str:
    """The path to the first part of ``value`` that does not pickle: ``value['lock'] (lock)``."""
    # What contains itself has no innermost part.
    if depth == _DEEPEST:
        parts = []
    elif isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    else:
        parts = []
    for path, part in parts:
        try:
            cloudpickle.dumps(part)
        except (Exception, SystemExit):
            return offender(path, part, depth + 1)
    return f"{name} ({type(value).__module__}.{type(value).__qualname__})"


def _failure(rank: int, error: BaseException) -> Report:
    kind, summary = "raised", f"raised {type(error).__name__}: {described(error)}"
    if isinstance(error, SystemExit):
        code = repr(error.code) if isinstance(error.code, int | str | None) else described(error)
        kind = "exited"
        summary = f"called sys.exit({shortened(code)}) before its function had returned"
    elif isinstance(error, MismatchError):
        kind, summary = "mismatch", str(error)
    elif isinstance(error, PeerLostError) or "gloo/transport/" in summary:
        # Of what PyTorch sends by itself, gloo says the same in a RuntimeError.
        kind = "peer_lost"
    elif isinstance(error, UnpicklableError):
        kind, summary = "unpicklable", f"has a result that cannot travel: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_internal(frame.filename)]
    location = f'"{own[-1].filename}", line {own[-1].lineno}' if own else ""
    text = "".join(traceback.format_list(_learners_part(frames)))
    text += "".join(traceback.format_exception_only(error))
    if kind == "raised" and (error.__cause__ is not None or isinstance(error, BaseExceptionGroup)):
        text = "".join(traceback.format_exception(error))
    return Report(rank, kind, summary=summary, location=location, traceback=shortened(text))


def _learners_part(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames from the learner's function down, without labkit's own at either end."""
    first, last = 0, len(frames)
    while first < last and is_internal(frames[first].filename):
        first += 1
    while last > first and is_ours(frames[last - 1].filename):
        last -= 1
    return list(frames[first:last])


def run_here(
    fn, args: tuple, world_size: int, device: str, transport: str, timeout_s: float
) -> list[Report]:
    """Run ``fn`` in this process, which ``torchrun`` has started as a rank; all ranks' reports.

    Raises:
        ValueError: ``world_size`` is not what torchrun started.
        ConnectionError: the other ranks cannot be reached.
        Whatever ``fn`` raises: torchrun then ends the other ranks.
    """
    global inside_a_run
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(
            f"world_size is {world_size}, but torchrun started {format_count(started, 'rank')}: "
            f"use world_size={started}, or another --nproc-per-node"
        )
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if transport == "shared" and local_world_size < world_size:
        raise ValueError(
            f"transport 'shared' is for ranks of one machine, and here are {local_world_size} of "
            f"{world_size}: use 'auto' or 'gloo'"
        )
    placement = plan(local_world_size, device, transport)
    if placement.note and os.environ["RANK"] == "0":
        print(placement.note, file=sys.stderr)
    comm = connect(placement, timeout_s)
    own_memory = _reports_comm(comm, local_world_size, timeout_s)
    comm.session.start_together()
    started_s = time.perf_counter()
    inside_a_run = True
    try:
        value = fn(comm, *args)
    finally:
        inside_a_run = False
    mine = _success(comm, dump_value(value), time.perf_counter() - started_s)
    if own_memory is not None:
        return [pickle.loads(packed) for packed in _gather_bytes(own_memory, pickle.dumps(mine))]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def _reports_comm(comm: Comm, local_world_size: int, timeout_s: float) -> Comm | None:
    """Where ranks of one machine exchange reports: memory that only this user's processes open.

    Reports are pickled, and whoever writes into a pickle has its reader run code. gloo's addresses
    come from the store, and its sockets ask nobody who they are. None on several machines, and
    where the system has no such memory: there nothing else is left.

    Raises:
        ConnectionError: the ranks of one machine cannot open it, though its system has it.
    """
    if local_world_size < comm.world_size:
        return None
    store = dist.distributed_c10d._get_default_store()
    arena = meet(store, comm.rank, comm.world_size)
    if arena is None:
        if not sys.platform.startswith("linux"):
            return None
        raise ConnectionError(
            "the ranks of this machine cannot open each other's memory through /proc/PID/fd, and "
            "labkit takes pickled results from nowhere else: run it without torchrun"
        )
    transport = SharedTransport(arena, comm.rank, timeout_s + _PATIENCE_S)
    return Comm(comm.rank, comm.world_size, torch.device("cpu"), transport)


def _gather_bytes(comm: Comm, mine: bytes) -> list[bytes]:
    """Every rank's bytes, in the order of the ranks."""
    lengths = [int(length) for length in all_gather(comm, torch.tensor(len(mine)))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = all_gather(comm, padded)
    return [bytes(data[:length].numpy()) for data, length in zip(everyone, lengths)]


def _watch_launcher(control: Connection) -> threading.Event:
    """What is set once the launcher lets this rank go; if the launcher is gone, the rank ends.

    A killed launcher (SIGKILL) ends nobody by itself: a thread waits for the end of its pipe, and
    of its process, since a child that the launcher has forked may hold the pipe open.
    """
    let_go = threading.Event()
    launcher = parent_process().sentinel

    def watch():
        if control in wait([control, launcher]) and may_go(control):
            let_go.set()
            wait([launcher])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="labkit-launcher-watch", daemon=True).start()
    return let_go


def _flush() -> None:
    """Write out what is printed; a function may have put anything in the place of the streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _capture_output(output: Connection) -> None:
    """Send everything written to file descriptors 1 and 2, by Python or C, to the launcher."""
    _flush()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(descriptor, "wb", buffering=0, closefd=False)
        text = io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True)
        setattr(sys, stream, text)
    # A C-level handler: it answers even while the main thread is stuck in a native call.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
