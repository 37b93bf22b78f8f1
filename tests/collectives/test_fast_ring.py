"""The fast ring against the readable one: the same bits, at the same cost."""

import random
import time

import pytest
import torch
from cases import OPS, paid, values_of
from ranks import travel_by_value

from labkit import WorkerError, run
from labkit.collectives import Reduction, fast_ring_all_reduce, ring_all_reduce
from labkit.comm.deadlock import latest_collectives
from labkit.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES
from labkit.costs.traffic import Cost, ring_all_reduce_cost
from labkit.errors import PeerLostError

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


def breaks_its_ring(comm, fault, size):
    """Returns the counts of one all-reduce on a ring with the same fault on all ranks."""
    from labkit.collectives import fast_ring

    class Broken(fast_ring.Ring):
        extra = True

        def put(self, segment, dtype):
            super().put(segment, dtype)
            if fault == "sends a segment twice" and self.extra:
                super().put(segment, dtype)

        def reduce_column(self, segments, following):
            if fault == "skips a segment" and following is None:
                # The last hop of the last column is neither sent nor waited for.
                self.steps = [*self.steps[:-2], (self.steps[-2][0], None)]
            if fault == "sends a segment twice" and self.extra:
                self.extra = False
                self.left.arrive(segments[self.steps[0][0].recv_chunk].numel(), torch.float32)
                self.left.release()
            if fault == "runs the timetable twice":
                super().reduce_column(segments, None)
                self.begin(segments)
            super().reduce_column(segments, following)

    fast_ring.Ring = Broken
    return paid(comm, fast_ring_all_reduce, torch.ones(size), "sum")[1]


@pytest.mark.parametrize(
    ("fault", "messages", "segments"),
    [
        ("none", 4, 8),
        ("skips a segment", 4, 7),
        ("sends a segment twice", 5, 9),
        ("runs the timetable twice", 8, 16),
    ],
)
def test_what_a_broken_ring_moves_is_what_is_counted(fault, messages, segments):
    """Two columns on three ranks: 4 messages of 2 segments each, if nothing is broken."""
    size = 2 * 3 * SEGMENT_BYTES // 4
    price = ring_all_reduce_cost(size, 4, 3)
    assert (price.messages, price.num_bytes) == (4, 8 * SEGMENT_BYTES)
    for counted in run(breaks_its_ring, fault, size, world_size=3).values:
        assert counted == Cost(messages, messages, segments * SEGMENT_BYTES)
        assert (counted == price) == (fault == "none")


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


def test_a_fault_inside_is_not_taken_for_a_lost_peer():
    """Over gloo a RuntimeError means a lost peer; in shared memory it is an ordinary error."""

    def breaks(comm):
        def combine(*_):
            raise RuntimeError("out of something")

        Reduction.combine = combine
        try:
            fast_ring_all_reduce(comm, torch.ones(4))
        except PeerLostError:
            return "lost"

    with pytest.raises(WorkerError, match="RuntimeError: out of something"):
        run(breaks, world_size=2)
