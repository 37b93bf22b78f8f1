"""The fast ring against the readable one: the same bits, at the same cost."""

import pytest
import torch
from cases import bits, paid, ring_cost, values_of, wide_bytes

from labkit import run
from labkit.collectives import fast_ring_all_reduce, ring_all_reduce
from labkit.engine.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES


def both_rings(comm):
    """At the limits of segments: differences between the rings, and from the formula."""
    wrong = []
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "mean"), (torch.float64, "max")):
        wide = wide_bytes(op, dtype)
        one = comm.world_size * (SEGMENT_BYTES // wide)
        for size in (0, 1, 1000, one - 1, one, one + 1, (NUM_SLOTS + 2) * one + 7):
            fast, readable = (values_of(comm.rank, size, dtype) for _ in range(2))
            _, cost = paid(comm, fast_ring_all_reduce, fast, op)
            ring_all_reduce(comm, readable, op)
            if bits(fast) != bits(readable):
                wrong.append((dtype, size, "bits"))
            price = ring_cost(op, size, dtype, comm.world_size, comm.rank)
            if cost != price:
                wrong.append((dtype, size, cost, price))
    return wrong, set(comm.bytes_to)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_and_price_are_those_of_the_readable_ring(world_size):  # rows 10, 12
    for rank, (wrong, sent_to) in enumerate(run(both_rings, world_size=world_size).values):
        assert wrong == []
        assert sent_to == ({(rank + 1) % world_size} if world_size > 1 else set())
