"""The reductions that PyTorch asks a backend for: its operations, as those of ``Reduction``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.collectives.common import mean_of

# PyTorch's name of an operation -> that of ``Reduction``.
OPERATIONS = {
    "SUM": "sum",
    "AVG": "mean",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "sum",
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reduction_of(opts: Any, tensor: Tensor) -> str:
    """Return ``Reduction``'s name of the reduction that ``opts`` asks for; by default the sum.

    Any operation and dtype that gloo or NCCL takes. As in PyTorch's ``ProcessGroupNCCL``, the mean
    of integers is rounded towards 0, sum and product of bool are "or" and "and", and a PREMUL_SUM
    is for floats.

    Raises:
        ValueError: neither of them takes it.
    """
    reduce_op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    matching = [name for name in OPERATIONS if reduce_op == getattr(dist.ReduceOp, name)]
    if not matching:
        names = ", ".join(OPERATIONS)
        raise ValueError(f'the "labkit" backend has the reductions {names}, not {reduce_op}')
    name = matching[0]
    if name == "PREMUL_SUM" and tensor.dtype not in FLOATS:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"PREMUL_SUM is for floats of 16 bits and more, not for {dtype}: use SUM, or convert "
            "first, for example with .float()"
        )
    if name == "AVG":
        return mean_of(tensor.dtype)
    return OPERATIONS[name]


def scaled(tensor: Tensor, opts: Any) -> Tensor:
    """Multiply ``tensor`` by the factor of this rank, if ``opts`` asks for a PREMUL_SUM."""
    reduce_op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    if reduce_op != dist.ReduceOp.PREMUL_SUM:
        return tensor
    # Only the pickled operation tells its factor.
    _, factor = reduce_op.__getstate__()
    return tensor * torch.as_tensor(factor, dtype=tensor.dtype)
