"""The fast ring against the readable one: the same bits, at the same cost."""

import random
import time

import pytest
import torch
from cases import OPS, paid, values_of
from ranks import travel_by_value

from labkit import run
from labkit.collectives import Reduction, fast_ring_all_reduce, ring_all_reduce
from labkit.comm.deadlock import latest_collectives
from labkit.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES
from labkit.costs.traffic import ring_all_reduce_cost

travel_by_value(__name__)

WORLD_SIZES = [1, 2, 3, 4]
LARGE = ((torch.float32, "sum"), (torch.bfloat16, "mean"), (torch.float64, "max"))


def cases(world_size):
    """(dtype, op, number of elements): every dtype small, a few at the limits of segments."""
    # How a dtype is handled does not depend on the size: not all pairs for each number of ranks.
    small = (0, 1, 3, 1000) if world_size == 3 else (3,)
    found = [(dtype, op, size) for dtype, ops in OPS.items() for op in ops for size in small]
    for dtype, op in LARGE:
        found += [(dtype, op, size) for size in (0, 1, world_size - 1, 1000)]
        one = world_size * segment(dtype, op)
        sizes = (one + 1, (NUM_SLOTS + 2) * one + 7)
        if dtype == torch.float32:
            sizes += (one - 1, one, one + world_size)
        found += [(dtype, op, size) for size in sizes]
    return found


def segment(dtype, op):
    """The number of elements in one segment."""
    return SEGMENT_BYTES // Reduction.of(op, torch.empty(0, dtype=dtype)).wide.itemsize


def both_rings(comm, cases):
    """Returns differences from the readable ring, the formula and other ranks: none expected."""
    wrong = []
    for dtype, op, size in cases:
        fast, readable = (values_of(comm.rank, size, dtype) for _ in range(2))
        counts = size, dtype.itemsize, comm.world_size, comm.rank
        price = ring_all_reduce_cost(*counts, Reduction.of(op, fast).wide.itemsize)
        rings = (fast_ring_all_reduce, fast), (ring_all_reduce, readable)
        costs = [paid(comm, ring, tensor, op)[1] for ring, tensor in rings]
        if costs != [price, price]:
            wrong.append((dtype, op, size, "cost", costs, price))
        if not torch.equal(fast.view(torch.uint8), readable.view(torch.uint8)):
            wrong.append((dtype, op, size, "bits"))
    return wrong, dict(comm.bytes_to)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_and_price_are_those_of_the_readable_ring(world_size):  # rows 10, 12
    by_rank = run(both_rings, cases(world_size), world_size=world_size).values
    for rank, (wrong, bytes_to) in enumerate(by_rank):
        assert wrong == []
        assert set(bytes_to) == ({(rank + 1) % world_size} if world_size > 1 else set())


def test_over_gloo_it_is_the_readable_ring():
    few = [case for case in cases(2) if case[2] <= 3 and case[0] in (torch.float16, torch.int64)]

    def named(comm):
        fast_ring_all_reduce(comm, torch.ones(1))
        return latest_collectives(comm.session.board, comm.rank)

    names = {t: run(named, world_size=2, transport=t).values for t in ("shared", "gloo", "auto")}
    assert names["gloo"] == ["1. ring_all_reduce float32 [1] sum"] * 2
    assert names["shared"] == names["auto"] == ["1. fast_ring_all_reduce float32 [1] sum"] * 2
    for wrong, _ in run(both_rings, few, world_size=2, transport="gloo").values:
        assert wrong == []


def test_many_in_a_row_of_ranks_at_different_speeds_between_other_messages():
    """A rank may be several segments or even a whole all-reduce ahead of its neighbour."""

    def in_a_row(comm):
        pace = random.Random(comm.rank)
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        found = []
        for number in range(60):
            size = [1, 5, 70_000, 300_000][number % 4]
            mine = torch.full((size,), float(comm.rank + number))
            found.append(fast_ring_all_reduce(comm, mine).unique().tolist())
            if number % 3 == 0:
                theirs = torch.empty(size)
                comm.exchange(torch.full((size,), float(comm.rank)), right, theirs, left)
                found.append(theirs.unique().tolist())
            if pace.random() < 0.2:
                time.sleep(0.005)
        return found

    for rank, found in enumerate(run(in_a_row, world_size=3).values):
        expected = []
        for number in range(60):
            expected.append([3.0 + 3 * number])
            if number % 3 == 0:
                expected.append([float((rank - 1) % 3)])
        assert found == expected
