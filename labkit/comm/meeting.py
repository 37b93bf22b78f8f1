"""How ranks without a common launcher find their hosts, and map one arena on each of them.

A host is the ranks of one torchrun agent, or of one node of a cluster: two of them on one machine
are two hosts, which talk over the network.

At first the ranks share only a ``torch.distributed`` store. Under torchrun it listens on every
interface without a password, and anyone who reaches it can write into it. So what is in the store
consists of plain numbers of fixed length, and only says where the memory should be. A rank maps
what it finds there only if it looks like an arena made by ``meet``: memory of the same user,
sealed, of the right size. Whether all ranks have come is then read from that memory, which no
other user can open, and not from the store.

Source: memfd_create(2) and fcntl(2) for seals; proc(5), /proc/PID/fd, for access rights.
"""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.comm.board import LEFT
from labkit.comm.processes import loopback
from labkit.comm.shared_memory import Arena

# Mark, process id, descriptor, inode, and the boot id of the machine.
NOTE = struct.Struct("!8sqqQ36s")
MARK = b"labkit-1"
# Mark, the number of a rank's host, and its name.
HOST = struct.Struct("!8sq64s")
HOST_MARK = b"labkit-h"
_HIGHEST = 2**31 - 1
_OPEN, _NOT_OPEN = b"open", b"not open"
SUSPICION = (
    "Another program writes to this run's store, which has no password: make it listen where only "
    "your own processes can reach it (SECURITY.md)"
)


class Hosts(NamedTuple):
    """The hosts of a run, in the order of their first ranks: the ranks of each, and its name."""

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks of the host of ``rank``."""
        return next(ranks for ranks in self.ranks if rank in ranks)


def find_hosts(store: Any, rank: int, world_size: int) -> Hosts:
    """The hosts of these ranks.

    Args:
        store: the ``torch.distributed`` store of these ranks.

    Raises:
        ConnectionError: the store holds something that no rank has written.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    if local_world_size is None or local_world_size == os.environ.get("WORLD_SIZE"):
        return Hosts((tuple(range(world_size)),), (socket.gethostname(),))
    place = f"labkit/host/{store.add(f'labkit/hosts/{rank}', 1)}"
    host, name = int(os.environ.get("GROUP_RANK", "0")), socket.gethostname().encode()
    store.set(f"{place}/{rank}", HOST.pack(HOST_MARK, host, name))
    hosts: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for other in range(world_size):
        answer = store.get(f"{place}/{other}")
        mark, host, name = HOST.unpack(answer) if len(answer) == HOST.size else (b"", 0, b"")
        if mark != HOST_MARK:
            raise ConnectionError(
                f"the host of rank {other} is {answer[:20]!r} in the store, which labkit does not "
                f"write (is it the same labkit on all machines?). {SUSPICION}"
            )
        hosts.setdefault(host, []).append(other)
        text = name.rstrip(b"\0").decode(errors="replace")
        names.setdefault(host, "".join(char for char in text if char.isprintable()))
    return Hosts(tuple(map(tuple, hosts.values())), tuple(names.values()))


def meet(
    store: Any, rank: int, world_size: int, ranks: Sequence[int] | None = None
) -> Arena | None:
    """Map one arena on all ranks of a host: the first of them makes it, the others open it.

    Args:
        store: the ``torch.distributed`` store of these ranks. (PyTorch's type stubs allow strings
            only, but it also takes bytes.)
        world_size: of the whole run: the arena has a place for each of its ranks.
        ranks: of this host; None for all.

    Returns:
        The arena; None on all of ``ranks`` if one of them cannot open it (another container).

    Raises:
        ConnectionError: the store holds something that no rank has written.
    """
    ranks = range(world_size) if ranks is None else ranks
    # A store may outlive a group: the next group must not read the notes of this one.
    place = f"labkit/arena/{ranks[0]}/{store.add(f'labkit/arenas/{rank}', 1)}"
    if rank == ranks[0]:
        arena = Arena(world_size)
        store.set(place, _note(arena.descriptor))
    else:
        try:
            arena = _open(world_size, *_read_note(store.get(place)))
        except ConnectionError:
            # The others must not wait for this rank.
            store.set(f"{place}/{rank}", "refused")
            raise
    if arena is not None:
        arena.board.ranks[rank]["pid"] = os.getpid()
    store.set(f"{place}/{rank}", _OPEN if arena else _NOT_OPEN)
    # The file must not be closed before all have opened it.
    answers = {other: store.get(f"{place}/{other}") for other in ranks}
    return _agree(answers, arena, rank)


def _agree(answers: dict[int, bytes], arena: Arena | None, rank: int) -> Arena | None:
    """The arena if all ranks of a host have opened it; None if one has not."""
    for other, answer in answers.items():
        if answer not in (_OPEN, _NOT_OPEN):
            raise ConnectionError(f"the answer of rank {other} is {answer[:20]!r}. {SUSPICION}")
    if arena is None:
        return None
    arena.close_file()
    if _NOT_OPEN in answers.values():
        # A rank that got other answers, from a forged store, must not wait for this one.
        arena.board.ranks[rank]["state"] = LEFT
        return None
    for other in answers:
        if not arena.board.ranks[other]["pid"]:
            raise ConnectionError(
                f"the store says that rank {other} has opened the shared memory of the ranks, "
                f"but it has not. {SUSPICION}"
            )
    return arena


def _note(descriptor: int) -> bytes:
    """Seal the arena, as a mark that ``meet`` made it, and return the note that describes it."""
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals())
    inode = os.fstat(descriptor).st_ino
    return NOTE.pack(MARK, os.getpid(), descriptor, inode, boot_id())


def _read_note(note: bytes) -> tuple[int, int, int, bytes]:
    if len(note) == NOTE.size:
        mark, pid, descriptor, inode, boot = NOTE.unpack(note)
        if mark == MARK and 0 < pid <= _HIGHEST and 0 <= descriptor <= _HIGHEST:
            return pid, descriptor, inode, boot
    raise ConnectionError(
        f"rank 0's note in the store is {len(note)} bytes that labkit does not write (is it the "
        f"same labkit on all machines?). {SUSPICION}"
    )


def _open(world_size: int, pid: int, descriptor: int, inode: int, boot: bytes) -> Arena | None:
    """Map the arena of a note; None if it is absent or was not made by ``meet`` of this user."""
    if boot != boot_id() or not boot.strip(b"\0"):
        return None
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
        # O_PATH does not open the file yet: a device could react, and a pipe could block.
        found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH)
        stack.callback(os.close, found)
        status = os.fstat(found)
        is_memory = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
        if is_memory and status.st_uid == os.geteuid() and status.st_ino == inode:
            opened = os.open(f"/proc/self/fd/{found}", os.O_RDWR)
            stack.callback(os.close, opened)
            # In another container the same path is another file. Sealed memory cannot shrink;
            # shrinking would kill the processes that touch it (SIGBUS).
            if fcntl.fcntl(opened, fcntl.F_GET_SEALS) == seals():
                arena = Arena(world_size, os.dup(opened))
                return arena if arena.num_bytes == status.st_size else None
    return None


def seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def boot_id() -> bytes:
    """An id of this machine and its latest boot; empty if unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_bytes().strip() if path.exists() else b""


def stay_on_loopback() -> None:
    """If torchrun has started all ranks on this machine, let gloo listen on loopback only."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None and local == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
