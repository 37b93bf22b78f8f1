"""Checks of what PyTorch passes to a backend (reductions, outputs, splits), before any message."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from labkit.collectives.common import check_fits
from labkit.comm.tensors import describe
from labkit.units import format_count

REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}

# Methods of a process group and reductions that are not supported, with the reason or what to
# call instead.
REFUSED = {
    "PREMUL_SUM": "it multiplies on the GPU, with NCCL; multiply the tensor first, then use SUM",
    "new_window": "one-sided access is for GPUs with NCCL; use send and recv",
    "reconfigure": "the ranks of a group stay the same; make another with new_group",
    "get_reconfigure_handle": "the ranks of a group stay the same; make another with new_group",
    "merge_remote_group": "the ranks of a group stay the same; make another with new_group",
    "_start_coalescing": "use the coalescing manager without a device, as with gloo",
}


def refusal(name: str) -> ValueError:
    """The error for an unsupported ``name``, with the reason from ``REFUSED``."""
    return ValueError(f'the "labkit" backend does not support {name}: {REFUSED[name]}')


def reduction_of(opts: Any) -> str:
    """The name, in ``Reduction``, of the reduction that ``opts`` asks for; by default the sum.

    Raises:
        ValueError: it is not supported.
    """
    asked = getattr(opts, "reduceOp", opts) if opts is not None else dist.ReduceOp.SUM
    for known, name in REDUCTIONS.items():
        if asked == known:
            return name
    raise refusal("PREMUL_SUM")


def equal_parts(whole: Tensor, size: int, like: Tensor) -> list[Tensor]:
    """Cut ``whole`` into P views, each of the shape of ``like``; ValueError if that fails."""
    if whole.numel() != size * like.numel() or whole.dtype != like.dtype:
        raise ValueError(
            f"{size} parts of {describe(like)} do not make {describe(whole)}: "
            f"{size} x {like.numel()} elements of one dtype are needed"
        )
    return list(whole.view(size, *like.shape).unbind())


def split_parts(whole: Tensor, size: int, splits: list[int]) -> list[Tensor]:
    """Cut ``whole`` into P views along dimension 0: of the given lengths, or of equal length."""
    length, rest = divmod(len(whole), size)
    if not splits and rest:
        raise ValueError(
            f"{describe(whole)} cannot be cut into {size} equal parts: give the split sizes"
        )
    return list(whole.split(splits or [length] * size))


def check_outputs(outputs: list[Tensor], tensor: Tensor, size: int) -> None:
    """Raise ValueError unless there is one output per rank, each like ``tensor``."""
    if len(outputs) != size:
        given = format_count(len(outputs), "output tensor")
        raise ValueError(f"{given} for {format_count(size, 'rank')}: give one for each rank")
    for output in outputs:
        check_fits(tensor, output, "the tensor that every rank sends")


def copy_all(outputs: list[Tensor], values: list[Tensor]) -> None:
    for output, value in zip(outputs, values):
        output.copy_(value)
