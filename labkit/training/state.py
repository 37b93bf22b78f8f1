"""Comparing the states that runs end with."""

import hashlib
import math

import torch
from torch import Tensor


def checksum(state: dict[str, Tensor]) -> str:
    """SHA-256 of all values, bit for bit: equal on two ranks only when their replicas are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def largest_difference(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference between two states: max over tensors of |a - b| / |b|.

    The norm is each tensor's largest magnitude, so that values near zero do not decide. NaN where
    a tensor holds one.

    Raises:
        ValueError: the states do not hold the same tensors.
    """
    if state.keys() != other.keys():
        raise ValueError(f"states differ in tensors: {sorted(state.keys() ^ other.keys())}")
    worst = 0.0
    for name, tensor in other.items():
        if not tensor.numel():
            continue
        scale = max(tensor.double().abs().max().item(), torch.finfo(torch.float64).tiny)
        difference = (state[name].double() - tensor.double()).abs().max().item()
        if math.isnan(difference):
            return math.nan
        worst = max(worst, difference / scale)
    return worst
