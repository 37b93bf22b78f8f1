"""All-reduce of a bucket in shared memory: sums in rank order, at any size, dtype and pace."""

import random
import time

import pytest
import torch
from cases import bits, values_of
from ranks import open_descriptors

from labkit import run
from labkit.collectives import SharedBucket, direct_all_reduce, fast_ring_all_reduce
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.engine.comm.shared_memory import SEGMENT_BYTES
from labkit.engine.errors import WorkerError

# Below, at and above a segment of the slice of one rank, for 4 ranks; and no elements at all.
SEGMENT = 4 * SEGMENT_BYTES // 4
SIZES = (0, 1, 3, 1001, SEGMENT - 1, SEGMENT, SEGMENT + 5, 3 * SEGMENT + 7)


def reduced(comm, dtype, op):
    """Bits of the reduced tensors by size; messages and bytes by size."""
    tensors = []
    traffic = []
    for size in SIZES:
        bucket = SharedBucket(comm, size, dtype, torch.device("cpu"))
        bucket.flat[:size] = values_of(comm.rank, size, dtype)
        before = comm.messages, comm.bytes_sent
        bucket.all_reduce(comm, op)
        traffic.append((comm.messages - before[0], comm.bytes_sent - before[1]))
        tensors.append(bits(bucket.flat[:size]))
    return tensors, traffic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_replicas_hold_the_sum_in_rank_order_and_send_the_bytes_of_a_ring(world_size, dtype):
    expected = []
    costs = []
    for size in SIZES:
        total = values_of(0, size, dtype)
        for rank in range(1, world_size):
            total = total + values_of(rank, size, dtype)
        expected.append(bits(total))
        padded = -(-size // world_size) * world_size
        cost = ring_all_reduce_cost(padded, dtype.itemsize, world_size)
        costs.append((cost.messages, cost.num_bytes))
    for tensors, traffic in run(reduced, dtype, "sum", world_size=world_size).values:
        assert tensors == expected
        assert traffic == costs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bits_are_rounded_once(dtype):
    expected = []
    for size in SIZES:
        total = torch.stack([values_of(rank, size, dtype).float() for rank in range(3)])
        expected.append(bits(total.mean(0).to(dtype)))
    for tensors, _ in run(reduced, dtype, "mean", world_size=3).values:
        assert tensors[:4] == expected[:4]


def test_many_in_a_row_of_ranks_at_different_speeds_and_no_file_is_left_open():
    """No rank overwrites what another rank still reads: in a bucket, a window or a ring's slots.

    A rank may be several segments or even a whole all-reduce ahead of its neighbor.
    """

    def in_a_row(comm):
        pace = random.Random(comm.rank)
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        files_before = open_descriptors()
        bucket = SharedBucket(comm, 100_000, torch.float32, torch.device("cpu"))
        wrong = []
        for number in range(240):
            size = [1, 5, 70_000, 300_000][number // 3 % 4]
            own = torch.full((size,), float(comm.rank + number))
            if pace.random() < 0.2:
                time.sleep(0.005)
            if number % 3 == 0:
                bucket.flat.fill_(comm.rank + number)
                bucket.all_reduce(comm)
                own = bucket.flat
            elif number % 3 == 1:
                direct_all_reduce(comm, own)
            else:
                fast_ring_all_reduce(comm, own)
            if own.unique().tolist() != [3.0 + 3 * number]:
                wrong.append(number)
            if number % 8 == 7:
                theirs = torch.empty(size)
                comm.exchange(torch.full((size,), float(comm.rank)), right, theirs, left)
                if theirs.unique().tolist() != [left]:
                    wrong.append(("exchange", number))
        return wrong, open_descriptors() - files_before

    assert run(in_a_row, world_size=3).values == [([], 0)] * 3


def makes_one_more(comm, path):
    """Rank 0 makes a bucket more; the other rank has opened a file since, and is in barriers."""
    cpu = torch.device("cpu")
    bucket = SharedBucket(comm, 25, torch.float32, cpu)
    if comm.rank == 0:
        return SharedBucket(comm, 25, torch.float32, cpu), bucket
    with open(path, "r+b"):
        for _ in range(3):
            comm.barrier()
    return bucket


def test_ranks_out_of_step_get_an_error_and_touch_no_other_file(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"of the learner")
    with pytest.raises(WorkerError, match="shared_bucket"):
        run(makes_one_more, str(path), world_size=2, timeout_s=30)
    assert path.read_bytes() == b"of the learner"
