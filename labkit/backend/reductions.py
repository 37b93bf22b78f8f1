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
    """The name, in ``Reduction``, of the reduction that ``opts`` asks for; by default the sum.

    Any operation and dtype that gloo or NCCL takes. As in PyTorch's ``ProcessGroupNCCL``, the mean
    of integers is rounded towards 0, sum and product of bool are "or" and "and", and a PREMUL_SUM
    is for floats.

    Raises:
        ValueError: neither of them takes it.
    """
    asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    known = [name for name in OPERATIONS if asked == getattr(dist.ReduceOp, name)]
    if not known:
        names = ", ".join(OPERATIONS)
        raise ValueError(f'the "labkit" backend has the reductions {names}, not {asked}')
    if known == ["PREMUL_SUM"] and tensor.dtype not in FLOATS:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"PREMUL_SUM is for floats of 16 bits and more, not for {dtype}: use SUM, or convert "
            "first, for example with .float()"
        )
    op = OPERATIONS[known[0]]
    return mean_of(tensor.dtype) if op == "mean" else op


def scaled(tensor: Tensor, opts: Any) -> Tensor:
    """``tensor`` times the factor of this rank, if ``opts`` asks for a PREMUL_SUM."""
    asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    if asked != dist.ReduceOp.PREMUL_SUM:
        return tensor
    # Only the pickled operation tells its factor.
    _, factor = asked.__getstate__()
    return tensor * torch.as_tensor(factor, dtype=tensor.dtype)
