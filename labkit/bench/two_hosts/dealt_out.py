"""A ring whose ranks were dealt out to the hosts in turn, as in a cyclic distribution.

Schedulers number ranks host by host (Slurm: ``--distribution=block``) or in turn (``cyclic``).
In turn, every message of a ring crosses the cable: on each host, all ranks share one card.
"""

import torch

from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import split_chunks
from labkit.comm.comm import Comm
from labkit.schedules.ring import ring_share_only, ring_share_reduce


def order_in_turn(world_size: int, num_hosts: int = 2) -> list[int]:
    """Ranks that are numbered host by host, in the order in which hosts take turns.

    Of 4 ranks on 2 hosts: [0, 2, 1, 3].
    """
    on_each = world_size // num_hosts
    return [host * on_each + place for place in range(on_each) for host in range(num_hosts)]


@torch.no_grad()
def dealt_out_ring(comm: Comm, tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` [N] in place, on a ring in which the two hosts take turns."""
    order = order_in_turn(comm.world_size)
    place, chunks = order.index(comm.rank), split_chunks(tensor, comm.world_size)
    reduction = Reduction.of("sum", tensor)
    for step in ring_share_reduce(place, comm.world_size):
        mine = chunks[step.recv_chunk]
        incoming = torch.empty_like(mine)
        comm.exchange(chunks[step.send_chunk], order[step.dst], incoming, order[step.src])
        reduction.combine(mine, incoming, out=mine)
    for step in ring_share_only(place, comm.world_size):
        incoming = chunks[step.recv_chunk]
        comm.exchange(chunks[step.send_chunk], order[step.dst], incoming, order[step.src])
    return tensor
