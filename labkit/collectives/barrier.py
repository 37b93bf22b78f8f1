"""A barrier made of messages: no rank leaves before all ranks have arrived.

Symbols: P ranks. Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization"
(1988), the dissemination barrier.
"""

import torch

from labkit import gpus
from labkit.collectives.common import transfer
from labkit.comm.comm import Comm
from labkit.schedules.tree import dissemination


def dissemination_barrier(comm: Comm) -> None:
    """Return when every rank has called this: ceil(log2 P) steps, a message of one byte in each.

    In step s a rank tells rank + 2^s (mod P) that it has arrived itself, and so have all the ranks
    that it has heard of: 1 rank after the first step, then 3, then 7. After the last step it has
    heard of all ranks, directly or through others.
    """
    token = torch.zeros(1, dtype=torch.uint8, device=comm.device)
    heard = torch.empty_like(token)
    with comm.collective("dissemination_barrier"), comm.span("barrier"):
        for step in dissemination(comm.rank, comm.world_size):
            transfer(comm, step, token, heard)
        # On NCCL the messages are only queued so far, and this rank would leave before the others
        # have come.
        gpus.synchronize(comm.device)
