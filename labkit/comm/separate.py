"""A ``Comm`` of its own for one kind of traffic: messages of an edge are first in, first out.

Threads that share a ``Comm`` would take each other's messages. The ranks meet once more instead,
in a store that they share: with shared memory of their own on each host, and gloo between hosts.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from labkit.comm import meeting
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import emulated_hosts, over_link
from labkit.comm.hosts_transport import HostsTransport
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport
from labkit.comm.transport import Transport

# How many spans it keeps: training for days must not fill the memory with spans.
_KEPT_SPANS = 10_000


def separate_comm(
    purpose: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int] | None = None,
) -> Comm:
    """A Comm of these ranks for CPU tensors; all of them call this, as often.

    Args:
        purpose: of this Comm, in the store.
        store: which these ranks share.
        timeout: the longest wait for a message.
        ranks: as they are numbered in the run; None for all of them.
    """
    cpu = torch.device("cpu")
    store = dist.PrefixStore(f"labkit/{purpose}", store)
    hosts = meeting.find_hosts(store, rank, size)
    neighbours = hosts.neighbours(rank)
    arena = meeting.meet(store, rank, size, neighbours)
    transport: Transport
    near = None if arena is None else SharedTransport(arena, rank, timeout.total_seconds())
    if near is not None and len(neighbours) == size:
        transport = near
    else:
        meeting.stay_on_loopback()
        far = TorchTransport("gloo", cpu, dist.ProcessGroupGloo(store, rank, size, timeout))
        transport = far if near is None else HostsTransport(near, far, neighbours)
    linked, board = over_link(transport, ranks), None if arena is None else arena.board
    comm = Comm(rank, size, cpu, linked, board, keep_spans=_KEPT_SPANS, hosts=hosts.ranks)
    comm.hosts = emulated_hosts(ranks or range(size)) or hosts.ranks
    return comm
