"""The rendezvous of ranks without a common launcher: find their hosts, map one arena on each.

A host is the ranks of one torchrun agent, or of one node of a cluster: two of them on one machine
are two hosts, which talk over the network.

At first the ranks share only a ``torch.distributed`` store. Under torchrun it listens on every
interface without a password, and anyone who reaches it can write into it. So what is in the store
only says where the memory should be. A rank maps what it finds there only if it looks like an
arena made by ``map_arena``: memory of the same user, sealed, of the right size.

Source: memfd_create(2) and fcntl(2) for seals; proc(5), /proc/PID/fd, for access rights.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import over_link
from labkit.engine.comm.shared_memory import Arena, loopback, open_sealed, seal
from labkit.engine.comm.shared_transport import SharedTransport
from labkit.engine.comm.torch_transport import TorchTransport
from labkit.engine.comm.transport import Transport
from labkit.engine.started import read_numbers
from labkit.schedules.ring import Hosts, host_of

# How many spans a separate Comm keeps: training for days must not fill the memory with them.
_KEPT_SPANS = 10_000


def find_hosts(store: Any, rank: int, world_size: int) -> tuple[Hosts, tuple[str, ...]]:
    """Return the hosts of these ranks, in the order of their first ranks, and their names."""
    name = socket.gethostname()
    if _is_one_host():
        return (tuple(range(world_size)),), (name,)
    attempt = store.add(f"labkit/hosts/{rank}", 1)
    prefix = f"labkit/host/{attempt}"
    host = read_numbers().host
    if host is None:
        host = name
    store.set(f"{prefix}/{rank}", f"{host} {name}")
    ranks_by_host: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    for peer in range(world_size):
        note = store.get(f"{prefix}/{peer}").decode(errors="replace")
        host, _, name = note.partition(" ")
        ranks_by_host.setdefault(host, []).append(peer)
        names.setdefault(host, "".join(filter(str.isprintable, name[:64])))
    return tuple(map(tuple, ranks_by_host.values())), tuple(names.values())


def map_arena(
    store: Any, rank: int, world_size: int, ranks: Sequence[int] | None = None
) -> Arena | None:
    """Map one arena on ``ranks``, by default all: the first of them makes it, the others open it.

    It has room for each of ``world_size`` ranks. The result is None on all of ``ranks`` if one
    of them cannot open it (another container).
    """
    ranks = ranks or range(world_size)
    # A store may outlive a group: the next group must not read the notes of this one.
    attempt = store.add(f"labkit/arenas/{rank}", 1)
    key = f"labkit/arena/{ranks[0]}/{attempt}"
    if rank == ranks[0]:
        arena = Arena(world_size)
        seal(arena.descriptor)
        store.set(key, f"{os.getpid()} {arena.descriptor}")
    else:
        arena = _open(world_size, store.get(key))
    store.set(f"{key}/{rank}", "open" if arena else "not open")
    # The file must not be closed before all have opened it.
    answers = {store.get(f"{key}/{peer}") for peer in ranks}
    if arena is None or answers != {b"open"}:
        return None
    arena.close_file()
    return arena


def _open(world_size: int, note: bytes) -> Arena | None:
    """Map the arena of a note; None if it is absent, or another user or program made it."""
    with contextlib.suppress(OSError, ValueError):
        pid, descriptor = map(int, note.split())
        opened = open_sealed(pid, descriptor)
        if opened is not None:
            num_bytes = os.fstat(opened).st_size
            arena = Arena(world_size, opened)
            if arena.num_bytes == num_bytes:
                return arena
    return None


def _is_one_host() -> bool:
    numbers = read_numbers()
    return numbers.world_size is not None and numbers.local_world_size == numbers.world_size


def stay_on_loopback() -> None:
    """Let gloo listen on loopback only, if all ranks were started on this machine."""
    if _is_one_host():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())


def separate_comm(
    purpose: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int] | None = None,
) -> Comm:
    """Make a separate Comm for one kind of traffic of these ranks; all call this equally often.

    Messages of an edge are first in, first out: threads that share a ``Comm`` would take each
    other's. So the ranks hold one more rendezvous, with separate shared memory on each host, and
    gloo between hosts, for CPU tensors. A message may take up to ``timeout``; ``ranks`` are
    numbered as in the run, by default all.
    """
    cpu = torch.device("cpu")
    store = dist.PrefixStore(f"labkit/{purpose}", store)
    hosts, _ = find_hosts(store, rank, size)
    neighbors = hosts[host_of(rank, hosts)]
    arena = map_arena(store, rank, size, neighbors)
    board = near = None
    if arena is not None:
        board = arena.board
        near = SharedTransport(arena, rank, timeout.total_seconds())
    if near is not None and len(neighbors) == size:
        transport: Transport = near
    else:
        stay_on_loopback()
        far = TorchTransport("gloo", cpu, dist.ProcessGroupGloo(store, rank, size, timeout))
        transport = far if near is None else HostsTransport(near, far, neighbors)
    comm = Comm(rank, size, cpu, transport, board, keep_spans=_KEPT_SPANS, hosts=hosts)
    return over_link(comm, ranks)


class HostsTransport(Transport):
    """Point-to-point through the memory of this host, or over a process group of all ranks.

    ``near`` reaches the ``neighbors``, the ranks of this host, and ``far`` all others.
    """

    def __init__(self, near: SharedTransport, far: TorchTransport, neighbors: Sequence[int]):
        self.near = near
        self.far = far
        self.neighbors = frozenset(neighbors)
        self.sent = near.sent = far.sent

    def to(self, peer: int) -> Transport:
        return self.near if peer in self.neighbors else self.far

    def send(self, tensor: Tensor, dst: int) -> None:
        self.to(dst).send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        self.to(src).recv(tensor, src)

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        # What goes over the network moves by itself once it has begun.
        if self.to(dst) is self.to(src):
            self.to(dst).exchange(send, dst, recv, src)
        elif self.to(dst) is self.far:
            with self.far.sending(send, dst):
                self.near.recv(recv, src)
        else:
            with self.far.receiving(recv, src):
                self.near.send(send, dst)

    @contextmanager
    def exchanging(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Iterator[None]:
        if dst not in self.neighbors and src not in self.neighbors:
            with self.far.exchanging(send, dst, recv, src):
                yield
        else:
            self.exchange(send, dst, recv, src)
            yield

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        return self.far.arrived(tensor, sources)

    def barrier(self) -> None:
        self.far.barrier()

    def set_timeout(self, timeout_s: float) -> None:
        self.near.set_timeout(timeout_s)
        self.far.set_timeout(timeout_s)

    def abandon(self) -> None:
        self.near.abandon()

    def close(self) -> None:
        self.near.close()
