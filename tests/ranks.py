"""What the tests with real ranks share: run helpers, and the check that nothing is left behind."""

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import pickle
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import cloudpickle
import psutil
import torch
import torch.distributed as dist

import labkit
from labkit.costs.traffic import Cost
from labkit.schedules.tree import binomial_broadcast


def travel_by_value(module_name: str) -> None:
    """Send a test module's functions to the ranks by value, like those of a notebook."""
    cloudpickle.register_pickle_by_value(sys.modules[module_name])


def server_pid() -> int | None:
    """Process id of the forkserver of this process; None if it has not been started."""
    return forkserver._forkserver._forkserver_pid


def running_ranks() -> list[int]:
    """Process ids of the ranks that are alive: the children of this process's forkserver."""
    try:
        children = psutil.Process(server_pid()).children() if server_pid() else []
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if is_alive(child.pid)]


def leftovers() -> set[str]:
    """What a run could have left: mapped shared memory, and files in the temporary folder.

    Each test process has its own temporary folder. The folder of the forkserver in it is expected.
    """
    maps = Path("/proc/self/maps").read_text().split()
    shared = {name for name in maps if name.startswith("/dev/shm/") and Path(name).exists()}
    folder = Path(tempfile.gettempdir())
    expected = ("pymp-", "pytest-of-", "torchinductor_")
    return shared | {str(f) for f in folder.iterdir() if not f.name.startswith(expected)}


def wait_until(condition, seconds: float) -> bool:
    """Poll until ``condition()`` holds; return whether it did in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def until_they_wait(comm, ranks) -> None:
    """On a rank: return once these ranks are inside an operation, however late they come."""
    doing = comm.session.board.ranks["op"]
    assert wait_until(lambda: all(doing[rank] for rank in ranks), 30)


def session_of(leader: int) -> list[int]:
    """Process ids of a session: those of a program started with ``start_new_session``."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def open_descriptors(of: str = "") -> int:
    """The number of open files of this process whose names contain ``of``."""
    # Otherwise garbage of an earlier test could be collected between two counts.
    gc.collect()
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(of in link for link in links)


def equal(one, other):
    """Whether two results, tensors in lists among them, are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def plain(folder, function, world_size=2, backend="labkit", timeout_s=1800):
    """Run ``function(rank)`` in P processes with a default group: [(exit code, outcome)].

    No launcher of ours supervises them. The outcome is what the function returned or raised; None
    for a process that ended without reporting either.
    """
    context = multiprocessing.get_context("forkserver")
    settings = str(folder), pickle.dumps(function), world_size, backend, timeout_s
    processes = [
        context.Process(target=_plain_rank, args=(rank, *settings)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + 90
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        processes[rank].kill()
    assert not hanging, f"ranks {hanging} hang"
    return [
        (process.exitcode, _outcome_of(folder, rank)) for rank, process in enumerate(processes)
    ]


def _plain_rank(rank, folder, function, world_size, backend, timeout_s):
    assert labkit  # it registers its backend
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    # A short timeout of the group begins when the last rank is there.
    meet(store, "start", world_size)
    group = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **group)
    dist.barrier()
    try:
        outcome = pickle.loads(function)(rank)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(outcome, file)
    dist.destroy_process_group()


def stay():
    """The last thing that the ranks of ``plain`` do where none may leave before the others."""
    meet(dist.distributed_c10d._get_default_store(), "stay", dist.get_world_size())


def meet(store, name, world_size):
    """Wait until all ranks are here, however long a group would wait for them."""
    store.add(name, 1)
    assert wait_until(lambda: store.add(name, 0) == world_size, 60)


def _outcome_of(folder, rank):
    path = folder / str(rank)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def broadcast_cost(num_bytes: int, world_size: int, rank: int, root: int = 0) -> Cost:
    """A broadcast by a binomial tree, whose timetable tests/schedules checks."""
    steps = list(binomial_broadcast(rank, world_size, root))
    messages = sum(step.dst is not None for step in steps)
    return Cost(len(steps), messages, messages * num_bytes)
