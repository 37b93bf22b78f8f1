"""All-reduce in one hop: the sum in the order of the ranks, at any size and pace."""

import pytest
import torch
from cases import bits, values_of

from labkit import run
from labkit.collectives import direct_all_reduce
from labkit.engine.comm.shared_memory import NUM_WINDOWS, WINDOW_BYTES

# One element below and above a window, and enough windows that each is used again.
LIMIT = WINDOW_BYTES // 4
SIZES = (0, 1, 1000, LIMIT - 1, LIMIT, LIMIT + 1, (2 * NUM_WINDOWS + 1) * LIMIT + 7)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_replicas_hold_the_sum_in_rank_order_to_the_bit(world_size):
    """In any other order the last bits of float32 sums differ."""

    def sums(comm):
        return [
            bits(direct_all_reduce(comm, values_of(comm.rank, size, torch.float32)))
            for size in SIZES
        ]

    expected = []
    for size in SIZES:
        total = values_of(0, size, torch.float32)
        for rank in range(1, world_size):
            total = total + values_of(rank, size, torch.float32)
        expected.append(bits(total))
    for by_size in run(sums, world_size=world_size).values:
        assert by_size == expected
