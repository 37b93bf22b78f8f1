"""A network that branches, a tower on each rank, as page 08 shows after its exercise."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.engine.comm.comm import Comm


def branch_step(comm: Comm, tower: nn.Module, head: Any, inputs: Tensor, targets: Tensor) -> None:
    """Forward and backward of head(tower 0 + tower 1 + ...) on P ranks, all towers at once.

    Rank r has tower r, rank 0 also the head; ``inputs`` [n, ...] are the same on all. In the end
    the parameters have the gradients of one device. Rank 0 sends and receives P - 1 messages.
    """
    peers = range(1, comm.world_size)
    with comm.span("forward"):
        leaving = tower(inputs)
    if comm.rank > 0:
        comm.send(leaving, 0)
        gradient = comm.recv(torch.empty_like(leaving), 0)
    else:
        came = [comm.recv(torch.empty_like(leaving), rank) for rank in peers]
        with comm.span("compute"):
            # A leaf: its gradient is known, and sent, before any tower goes backward.
            joined = sum(came, leaving.detach()).requires_grad_()
            functional.cross_entropy(head(joined), targets).backward()
        gradient: Any = joined.grad
        for rank in peers:
            comm.send(gradient, rank)
    with comm.span("backward"):
        leaving.backward(gradient)
