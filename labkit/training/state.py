"""Comparisons of the states with which runs end."""

import hashlib
import math

import torch
from torch import Tensor

from labkit.comm.transport import as_bytes


def checksum(state: dict[str, Tensor]) -> str:
    """SHA-256 of all names and values: equal on two ranks only if their replicas are equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(as_bytes(tensor.contiguous()).numpy().tobytes())
    return digest.hexdigest()


def tolerance(dtype: str, on_gpu: bool) -> float:
    """How far apart two runs that make the same updates may be, as a ``largest_difference``.

    The contract for synchronous techniques. In float32, GPUs choose other algorithms for other
    batch sizes and devices, and round more differently than a CPU; float64 tells mistakes apart
    from rounding everywhere.
    """
    if dtype == "float64":
        return 1e-10
    return 1e-4 if on_gpu else 1e-5


def largest_difference(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference between two states: max over tensors of |a - b| / |b|.

    The norm is each tensor's largest magnitude, so that values near zero do not dominate. A tensor
    that is zero but for rounding in both states has no such norm: then the difference is taken as
    it is. (A bias that starts at zero and whose effect BatchNorm cancels is such a tensor.) The
    result is NaN if a tensor contains NaN.

    Raises:
        ValueError: the states do not hold the same tensors.
    """
    if state.keys() != other.keys():
        raise ValueError(f"states differ in tensors: {sorted(state.keys() ^ other.keys())}")
    worst = 0.0
    for name, tensor in other.items():
        if not tensor.numel():
            continue
        mine, theirs = (t.double().abs().max().item() for t in (state[name], tensor))
        scale = max(theirs, torch.finfo(torch.float64).tiny)
        if tensor.is_floating_point() and max(mine, theirs) < 100 * torch.finfo(tensor.dtype).eps:
            scale = 1.0
        difference = (state[name].double() - tensor.double()).abs().max().item()
        if math.isnan(difference):
            return math.nan
        worst = max(worst, difference / scale)
    return worst
