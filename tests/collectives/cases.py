"""Helpers for the tests of collectives: operations by dtype, values by rank, costs of a call."""

import functools

import torch
from ranks import travel_by_value

from labkit.collectives import Reduction
from labkit.costs import traffic

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
    return result, traffic.Cost(*[b - a for a, b in zip(before, after)])


ONE_DEVICE = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduced(op, tensors):
    """Reduce the tensors of all ranks on one device: in float32 if they have 16 bits."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = functools.reduce(ONE_DEVICE[op], [tensor.to(wide) for tensor in tensors])
    return (total / len(tensors) if op == "mean" else total).to(dtype)


@functools.cache
def on_one_device(op, dtype, size, world_size):
    return reduced(op, [values_of(rank, size, dtype) for rank in range(world_size)])


def ring_cost(op, size, dtype, world_size, rank):
    """Partial sums travel wide, and results do not."""
    partial = traffic.share_reduce_cost(size, wide_bytes(op, dtype), world_size, rank)
    return partial + traffic.share_only_cost(size, dtype.itemsize, world_size, rank)


def wide_bytes(op, dtype):
    return Reduction.of(op, torch.empty(0, dtype=dtype)).accumulate_dtype.itemsize


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
