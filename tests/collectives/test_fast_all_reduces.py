"""The fast all-reduces at the limits of what they send at once: the bits of the readable ones."""

import pytest
import torch
from cases import bits, paid, ring_cost, values_of, wide_bytes

from labkit import run
from labkit.collectives import direct_all_reduce, fast_ring_all_reduce, ring_all_reduce
from labkit.engine.comm.shared_memory import NUM_SLOTS, NUM_WINDOWS, SEGMENT_BYTES, WINDOW_BYTES


def sizes_around(limit, at_once):
    """So many elements are sent at once, ``at_once`` times before memory is used again."""
    return (0, 1, 1000, limit - 1, limit, limit + 1, (at_once + 2) * limit + 7)


def wrong_sums(comm):
    """The sums that differ from the readable ring, the formula, or the sum in rank order."""
    wrong = []
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "mean"), (torch.float64, "max")):
        wide = wide_bytes(op, dtype)
        for size in sizes_around(comm.world_size * (SEGMENT_BYTES // wide), NUM_SLOTS):
            fast, readable = (values_of(comm.rank, size, dtype) for _ in range(2))
            _, cost = paid(comm, fast_ring_all_reduce, fast, op)
            ring_all_reduce(comm, readable, op)
            if bits(fast) != bits(readable):
                wrong.append((dtype, size, "bits"))
            price = ring_cost(op, size, dtype, comm.world_size, comm.rank)
            if cost != price:
                wrong.append((dtype, size, cost, price))
    sent_to = set(comm.bytes_to)
    # In any other order the last bits of float32 sums differ.
    for size in sizes_around(WINDOW_BYTES // 4, 2 * NUM_WINDOWS):
        total = values_of(0, size, torch.float32)
        for rank in range(1, comm.world_size):
            total += values_of(rank, size, torch.float32)
        if bits(direct_all_reduce(comm, values_of(comm.rank, size, torch.float32))) != bits(total):
            wrong.append((size, "in rank order"))
    return wrong, sent_to


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_and_price_are_those_of_the_readable_ones(world_size):  # rows 10, 12
    for rank, (wrong, sent_to) in enumerate(run(wrong_sums, world_size=world_size).values):
        assert wrong == []
        assert sent_to == ({(rank + 1) % world_size} if world_size > 1 else set())
