"""The all-reduce that "labkit" groups and ``ddp_hook`` use: ours, or the one chosen by ``use``."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit import collectives
from labkit.collectives.common import MEANS, Reduction, check_fits, in_place
from labkit.engine.comm.comm import Comm

AllReduce = Callable[[Comm, Tensor], Tensor | None]

# The function that the learner has chosen.
_chosen: AllReduce | None = None


def use(all_reduce: AllReduce | None) -> AllReduce | None:
    """Let every "labkit" group of this process, and ``ddp_hook``, sum with ``all_reduce``.

    Args:
        all_reduce: ``all_reduce(comm, tensor)`` sums a flat tensor [N] over the ranks, in place
            or by returning the sum; None restores ``fast_all_reduce``. On several hosts
            ``labkit.collectives.fast_hierarchical_all_reduce`` sends less between them.

    Returns what was used before.

    Call it on every rank. DDP asks for sums only; other reductions always use labkit's functions.
    """
    global _chosen
    if all_reduce is not None and not callable(all_reduce):
        raise ValueError(f"use() takes a function of comm and tensor, got {all_reduce!r:.60}")
    before = _chosen
    _chosen = all_reduce
    return before


def all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """All-reduce ``tensor`` in place with the function that ``use`` has chosen; returns it."""
    if tensor.layout != torch.strided:
        return collectives.sparse_all_reduce(comm, tensor, op)
    if _chosen is None or op not in ("sum", *MEANS):
        return collectives.fast_all_reduce(comm, tensor, op)
    reduction = Reduction.of(op, tensor)
    name = getattr(_chosen, "__name__", "all_reduce")
    with in_place(tensor) as flat, comm.collective(name, tensor, op):
        result = _chosen(comm, flat)
        if result is not None and result is not flat:
            check_fits(result, flat, f"the result of {name}")
            flat.copy_(result)
        reduction.finish(flat, comm.world_size)
    return tensor


def ddp_hook(comm: Comm, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook: ``model.register_comm_hook(comm, labkit.backend.ddp_hook)``.

    It works with any backend of DDP: only the gradients go through ``comm``. Returns the bucket's
    mean over the ranks, in a completed future.
    """
    future: Future[Tensor] = Future()
    future.set_result(all_reduce(comm, bucket.buffer(), "mean"))
    return future
