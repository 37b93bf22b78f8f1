"""``labkit.run`` in a process that ``torchrun`` has started, which is itself one of the ranks."""

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit import gpus
from labkit.collectives import all_gather
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.comm.meeting import meet
from labkit.comm.shared_transport import SharedTransport
from labkit.devices import plan, tell_once
from labkit.runtime.connect import PATIENCE_S, connect
from labkit.runtime.messages import Report
from labkit.runtime.prepare import seed_random_numbers
from labkit.runtime.worker import success
from labkit.units import format_count

# Whether ``run_as_rank`` is calling a function in this process at the moment.
inside_a_run = False


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
        Any exception of ``fn``: torchrun then ends the other ranks.
    """
    global inside_a_run
    local_world_size = _local_world_size(world_size, transport)
    chosen = plan(local_world_size, device, transport, devices=devices)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell_once(chosen.notes)
    comm = connect(chosen, timeout_s, link=link)
    memory = _report_memory(comm, local_world_size, timeout_s)
    seed_random_numbers(comm.rank)
    comm.session.start_together()
    started_s = time.perf_counter()
    inside_a_run = True
    try:
        value = fn(comm, *args)
        comm.session.finish("the end of its function")
        gpus.synchronize_used(comm.device)
    finally:
        inside_a_run = False
    mine = success(comm, value, time.perf_counter() - started_s)
    if memory is not None:
        return [pickle.loads(packed) for packed in _gather_bytes(memory, pickle.dumps(mine))]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def _local_world_size(world_size: int, transport: str) -> int:
    """The number of ranks on this machine.

    Raises:
        ValueError: the run does not fit the ranks that torchrun has started.
    """
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(
            f"world_size is {world_size}, but torchrun started {format_count(started, 'rank')}: "
            f"use world_size={started}, or another --nproc-per-node"
        )
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if transport == "shared" and local_world_size < world_size:
        raise ValueError(
            f"transport 'shared' is for ranks of one machine, and this machine has only "
            f"{local_world_size} of the {world_size} ranks: use 'auto' or 'gloo'"
        )
    return local_world_size


def _report_memory(comm: Comm, local_world_size: int, timeout_s: float) -> Comm | None:
    """A Comm over memory that only this user's processes can open, to exchange reports.

    Reports are pickles, and a pickle can make its reader run any code. gloo takes its addresses
    from the store, and its sockets do not check who connects. The result is None on several
    machines, and where the system has no such memory: the reports then travel over gloo.

    Raises:
        ConnectionError: the ranks of one machine cannot open the memory, though the system has it.
    """
    if local_world_size < comm.world_size:
        return None
    arena = meet(dist.distributed_c10d._get_default_store(), comm.rank, comm.world_size)
    if arena is None:
        if not sys.platform.startswith("linux"):
            return None
        raise ConnectionError(
            "the ranks of this machine cannot open each other's memory through /proc/PID/fd, and "
            "labkit takes pickled results only from there: run it without torchrun"
        )
    transport = SharedTransport(arena, comm.rank, timeout_s + PATIENCE_S)
    return Comm(comm.rank, comm.world_size, torch.device("cpu"), transport)


def _gather_bytes(comm: Comm, mine: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order."""
    lengths = [int(length) for length in all_gather(comm, torch.tensor(len(mine)))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = all_gather(comm, padded)
    return [bytes(data[:length].numpy()) for data, length in zip(everyone, lengths)]
