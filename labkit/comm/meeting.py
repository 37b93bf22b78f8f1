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
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.comm.board import LEFT
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import emulated_hosts, over_link
from labkit.comm.hosts_transport import HostsTransport
from labkit.comm.processes import loopback
from labkit.comm.shared_memory import Arena
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport
from labkit.comm.transport import Transport

# The process and the descriptor that hold an arena; the number of a rank's host, and its name.
NOTE, HOST = struct.Struct("!II"), struct.Struct("!I64s")
_OPEN, _NOT_OPEN = b"open", b"not open"
SUSPICION = (
    "Another program writes to this run's store, which has no password: make it listen where only "
    "your own processes can reach it (SECURITY.md)"
)
# How many spans a separate Comm keeps: training for days must not fill the memory with them.
_KEPT_SPANS = 10_000


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
    if _is_one_host():
        return Hosts((tuple(range(world_size)),), (socket.gethostname(),))
    place = f"labkit/host/{store.add(f'labkit/hosts/{rank}', 1)}"
    host, name = int(os.environ.get("GROUP_RANK", "0")), socket.gethostname().encode()
    store.set(f"{place}/{rank}", HOST.pack(host, name))
    hosts: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for other in range(world_size):
        host, name = _unpack(HOST, store.get(f"{place}/{other}"), f"host of rank {other}")
        hosts.setdefault(host, []).append(other)
        text = name.rstrip(b"\0").decode(errors="replace")
        names.setdefault(host, "".join(filter(str.isprintable, text)))
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
        # The seals are a mark that ``meet`` made it, and keep its size.
        with contextlib.suppress(AttributeError, OSError):
            fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, _seals())
        store.set(place, NOTE.pack(os.getpid(), arena.descriptor))
    else:
        try:
            arena = _open(world_size, *_unpack(NOTE, store.get(place), "note of the arena"))
        except ConnectionError:
            # The others must not wait for this rank.
            store.set(f"{place}/{rank}", "refused")
            raise
    if arena is not None:
        arena.board.ranks[rank]["pid"] = os.getpid()
    store.set(f"{place}/{rank}", _OPEN if arena else _NOT_OPEN)
    # The file must not be closed before all have opened it.
    answers = {other: store.get(f"{place}/{other}") for other in ranks}
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
    if not arena.board.ranks["pid"][list(ranks)].all():
        raise ConnectionError(
            "the store says that all ranks of this host have opened its shared memory, but one "
            f"has not. {SUSPICION}"
        )
    return arena


def _unpack(layout: struct.Struct, data: bytes, what: str) -> tuple[Any, ...]:
    if len(data) != layout.size:
        raise ConnectionError(
            f"the {what} in the store is {data[:20]!r}, which labkit does not write (is it the "
            f"same labkit on all machines?). {SUSPICION}"
        )
    return layout.unpack(data)


def _open(world_size: int, pid: int, descriptor: int) -> Arena | None:
    """Map the arena of a note; None if it is absent or was not made by ``meet`` of this user."""
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
        # O_PATH does not open the file yet: a device could react, and a pipe could block.
        found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH)
        stack.callback(os.close, found)
        status = os.fstat(found)
        is_memory = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
        if is_memory and status.st_uid == os.geteuid():
            opened = os.open(f"/proc/self/fd/{found}", os.O_RDWR)
            stack.callback(os.close, opened)
            # In another container the same path is another file. Sealed memory cannot shrink;
            # shrinking would kill the processes that touch it (SIGBUS).
            if fcntl.fcntl(opened, fcntl.F_GET_SEALS) == _seals():
                arena = Arena(world_size, os.dup(opened))
                return arena if arena.num_bytes == status.st_size else None
    return None


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _is_one_host() -> bool:
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return local is None or local == os.environ.get("WORLD_SIZE")


def stay_on_loopback() -> None:
    """If torchrun has started all ranks on this machine, let gloo listen on loopback only."""
    if "LOCAL_WORLD_SIZE" in os.environ and _is_one_host():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())


def separate_comm(
    purpose: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int] | None = None,
) -> Comm:
    """A Comm of its own for one kind of traffic of these ranks; all of them call this, as often.

    Messages of an edge are first in, first out: threads that share a ``Comm`` would take each
    other's. So the ranks meet once more, with shared memory of their own on each host, and gloo
    between hosts, for CPU tensors.

    Args:
        purpose: of this Comm, in the store.
        store: which these ranks share.
        timeout: the longest wait for a message.
        ranks: as they are numbered in the run; None for all of them.
    """
    cpu = torch.device("cpu")
    store = dist.PrefixStore(f"labkit/{purpose}", store)
    hosts = find_hosts(store, rank, size)
    neighbours = hosts.neighbours(rank)
    arena = meet(store, rank, size, neighbours)
    transport: Transport
    near = None if arena is None else SharedTransport(arena, rank, timeout.total_seconds())
    if near is not None and len(neighbours) == size:
        transport = near
    else:
        stay_on_loopback()
        far = TorchTransport("gloo", cpu, dist.ProcessGroupGloo(store, rank, size, timeout))
        transport = far if near is None else HostsTransport(near, far, neighbours)
    linked, board = over_link(transport, ranks), None if arena is None else arena.board
    comm = Comm(rank, size, cpu, linked, board, keep_spans=_KEPT_SPANS, hosts=hosts.ranks)
    comm.hosts = emulated_hosts(ranks or range(size)) or hosts.ranks
    return comm
