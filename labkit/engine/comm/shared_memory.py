"""Memory that the ranks of one machine share: the arena, and semaphores in it.

An arena is one piece of memory that all ranks map: the status board, and for every edge (source ->
destination) a few slots for segments of a message. Counting semaphores, a few per edge, say which
end may use a slot. Ranks that share an emulated network card find its state here, too.

The arena has no name in any file system, so nothing is left behind, however its processes end.
And here is what the system says of such processes.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

import psutil
import torch
from torch import Tensor

from labkit.engine.comm.board import Board

# The reasons for these sizes are in ``labkit.engine.comm.shared_transport``.
SEGMENT_BYTES = 512 * 1024
NUM_SLOTS = 4
WINDOW_BYTES = 512 * 1024
NUM_WINDOWS = 4

HAS_SEMAPHORES = sys.platform == "linux"
# A whole cache line, so that no two semaphores share a line; a sem_t takes the first half.
_SEMAPHORE_BYTES = 64
_KINDS = ("ready", "filled", "free", "met", "shared")
_PAGE_BYTES = 4096
_LIBC = ctypes.CDLL(None)


class Arena:
    """The memory that P ranks of one machine share.

    Args:
        world_size: P.
        descriptor: an open file that holds the arena; None makes a new one.
    """

    def __init__(self, world_size: int, descriptor: int | None = None):
        self.world_size = world_size
        # The semaphores of the edges, followed by one per emulated card.
        num_of_edges = len(_KINDS) * world_size**2
        self._semaphores_at = _round_up(Board.num_bytes(world_size), _SEMAPHORE_BYTES)
        end = self._semaphores_at + (num_of_edges + world_size) * _SEMAPHORE_BYTES
        self._slots_at = _round_up(end, _PAGE_BYTES)
        # Pages that no rank touches take no memory, so only the edges in use need any.
        self._windows_at = self._slots_at + world_size**2 * NUM_SLOTS * SEGMENT_BYTES
        self.num_bytes = self._windows_at + world_size * NUM_WINDOWS * WINDOW_BYTES
        self.descriptor = _unnamed_file(self.num_bytes) if descriptor is None else descriptor
        self._map = mmap.mmap(self.descriptor, self.num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.board = Board(world_size, self._map)
        if descriptor is None and HAS_SEMAPHORES:
            for number in range(num_of_edges + world_size):
                initial = 0
                if number >= num_of_edges:
                    initial = 1  # the lock of an emulated card
                elif number % len(_KINDS) == _KINDS.index("free"):
                    initial = NUM_SLOTS
                self._semaphore(number).initialize(initial)

    def __reduce__(self) -> tuple[Any, ...]:
        # multiprocessing passes an open file to a new process as a duplicated descriptor.
        return _from_duplicate, (self.world_size, DupFd(self.descriptor))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.close_file()

    def close_file(self) -> None:
        """Close the file: the memory stays mapped, but no other process can open it any more."""
        descriptor = self.descriptor
        self.descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Release the memory; it is unmapped when nothing refers to the board or a slot."""
        self.close_file()
        del self.board, self._bytes, self._map

    def semaphores(self, source: int, destination: int) -> list["Semaphore"]:
        """Return an edge's semaphores: ready (to receive), filled, free (slots), met, shared."""
        first = len(_KINDS) * (source * self.world_size + destination)
        return [self._semaphore(first + kind) for kind in range(len(_KINDS))]

    def card(self, host: int) -> tuple[Tensor, "Semaphore"]:
        """Return the emulated card that a host's ranks share: state [2], float64, and lock."""
        number = len(_KINDS) * self.world_size**2 + host
        # In the half of the lock's line that no sem_t takes.
        end = self._semaphores_at + (number + 1) * _SEMAPHORE_BYTES
        state = self._bytes[end - 16 : end].view(torch.float64)
        return state, self._semaphore(number)

    def slots(self, source: int, destination: int) -> list[Tensor]:
        """Return the slots of an edge, each [SEGMENT_BYTES] bytes."""
        edge = source * self.world_size + destination
        start = self._slots_at + edge * NUM_SLOTS * SEGMENT_BYTES
        return list(self._bytes[start : start + NUM_SLOTS * SEGMENT_BYTES].split(SEGMENT_BYTES))

    def windows(self, rank: int) -> list[Tensor]:
        """Return the windows that ``rank`` writes and all others read, each [WINDOW_BYTES]."""
        start = self._windows_at + rank * NUM_WINDOWS * WINDOW_BYTES
        return list(self._bytes[start : start + NUM_WINDOWS * WINDOW_BYTES].split(WINDOW_BYTES))

    def _semaphore(self, number: int) -> "Semaphore":
        return Semaphore(self._address + self._semaphores_at + number * _SEMAPHORE_BYTES)


def _from_duplicate(world_size: int, duplicate: Any) -> Arena:
    arena = Arena(world_size, duplicate.detach())
    arena.close_file()
    return arena


def share_blocks(
    board: Board, rank: int, num_bytes: int, barrier: Callable[[], None]
) -> list[Tensor] | None:
    """Map one block [num_bytes] of every rank, this one's new and zero; called by all ranks.

    The blocks have no name, and are gone when no rank refers to them any more. None on all ranks
    if one of them cannot open another's.
    """
    row = board.ranks[rank]
    descriptor = _unnamed_file(num_bytes)
    try:
        seal(descriptor)
        row["shares"] = descriptor
        barrier()
        blocks = []
        for peer_row in board.ranks:
            block = _map_block(int(peer_row["pid"]), int(peer_row["shares"]), num_bytes)
            if block is None:
                row["shares"] = -1
                break
            blocks.append(block)
        # The file must not be closed before all have opened it.
        barrier()
        all_could = bool((board.ranks["shares"] >= 0).all())
        barrier()
    finally:
        # The number may be another file's next.
        row["shares"] = -1
        os.close(descriptor)
    return blocks if all_could else None


def _map_block(pid: int, descriptor: int, num_bytes: int) -> Tensor | None:
    opened = open_sealed(pid, descriptor)
    if opened is None:
        return None
    try:
        if os.fstat(opened).st_size != num_bytes:
            return None
        path = f"/proc/self/fd/{opened}"
        # (It keeps no file open, as an ``mmap`` of Python does.)
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    finally:
        os.close(opened)


def seal(descriptor: int) -> None:
    """Fix the size of unnamed memory, which also marks it as labkit's (``open_sealed``)."""
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())


def open_sealed(pid: int, descriptor: int) -> int | None:
    """Open a process's sealed memory; None if this is another file, or another user's.

    Returns a descriptor of its own.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        # O_PATH does not open the file yet: a device could react, and a pipe could block.
        path_only = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH)
        stack.callback(os.close, path_only)
        status = os.fstat(path_only)
        is_memory = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
        if not is_memory or status.st_uid != os.geteuid():
            return None
        opened = os.open(f"/proc/self/fd/{path_only}", os.O_RDWR)
        # In another container the same path is another file. Sealed memory cannot shrink;
        # shrinking would kill the processes that touch it (SIGBUS).
        try:
            if fcntl.fcntl(opened, fcntl.F_GET_SEALS) == _seals():
                return opened
        except OSError:
            pass
        os.close(opened)
    return None


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _unnamed_file(num_bytes: int) -> int:
    """Make a file without a name, not limited by the size of /dev/shm; return its descriptor."""
    if hasattr(os, "memfd_create"):
        # The default mode would let every user open it. Seals let ``map_arena`` fix its size.
        descriptor = os.memfd_create("labkit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o600)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class Semaphore:
    """A POSIX semaphore in shared memory: a counter that a process can sleep on.

    Source: POSIX.1-2017, sem_init (process-shared), sem_post, sem_trywait, sem_timedwait.
    """

    def __init__(self, address: int):
        self._address = ctypes.c_void_p(address)

    def initialize(self, value: int) -> None:
        shared_between_processes = 1
        failed = _LIBC.sem_init(self._address, shared_between_processes, value)
        assert not failed

    def post(self) -> None:
        _LIBC.sem_post(self._address)

    def try_wait(self) -> bool:
        return not _LIBC.sem_trywait(self._address)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the counter is above 0, and take one; False after ``timeout_s``."""
        until_s = time.time() + timeout_s
        # Seconds and nanoseconds.
        timespec = (ctypes.c_long * 2)(int(until_s), int(until_s % 1 * 1e9))
        return not _LIBC.sem_timedwait(self._address, ctypes.byref(timespec))


def is_running(pid: int) -> bool:
    """Tell whether a process is alive; a zombie (ended, not yet waited for) is not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill_marked(name: str, mark: str, limit_s: float, reap: Callable[[], object]) -> None:
    """Kill this user's processes whose environment began with ``name=mark``.

    ``reap`` is called until none is left, to take notice of children that have ended.
    """
    deadline_s = time.monotonic() + limit_s
    while (processes := marked(name, mark)) and time.monotonic() < deadline_s:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        reap()
        time.sleep(0.05)


def marked(name: str, mark: str) -> list[psutil.Process]:
    """List the living processes that ``kill_marked`` kills."""
    processes = psutil.process_iter(["environ"])
    return [process for process in processes if (process.info["environ"] or {}).get(name) == mark]


def loopback() -> str:
    """Name the network interface that only processes of this machine can reach."""
    return "lo0" if sys.platform == "darwin" else "lo"
