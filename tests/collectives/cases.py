"""Helpers for the tests of collectives: operations by dtype, values by rank, costs of a call."""

import torch
from ranks import travel_by_value

from labkit.costs.traffic import Cost

travel_by_value(__name__)

NUMBERS = ("sum", "mean", "max", "min", "product")
BITS = ("sum", "max", "min", "product", "band", "bor", "bxor")
WHOLE = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = dict.fromkeys(WHOLE, BITS) | dict.fromkeys(FLOATS, NUMBERS)
OPS |= dict.fromkeys((torch.complex64, torch.complex128), ("sum", "mean", "product"))


def values_of(rank, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * rank + size % 997)
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(size, generator=generator, dtype=drawn).to(dtype)
    return torch.randint(2 if dtype == torch.bool else 256, (size,), generator=generator).to(dtype)


def paid(comm, collective, *args, **options):
    """Returns (the result of the call, its Cost according to this rank's counters)."""
    before = comm.operations, comm.messages, comm.bytes_sent
    result = collective(comm, *args, **options)
    after = comm.operations, comm.messages, comm.bytes_sent
    return result, Cost(*[b - a for a, b in zip(before, after)])
