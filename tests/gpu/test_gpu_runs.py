"""Runs on GPUs: how they start, how they fail, what arrives; and that nothing of them remains."""

import os
import signal
import subprocess
import sys

import needs
import pytest
import torch
from ranks import wait_until

from labkit import DeadlockError, WorkerError, run
from labkit.collectives import fast_ring_all_reduce, ring_all_reduce

# What a context or a run may leave for a moment; other programs may use the GPU as well.
SLACK_BYTES = 64 * 2**20


def add_neighbors(comm):
    mine = torch.full((1000,), float(comm.rank), device=comm.device)
    theirs = torch.zeros_like(mine)
    if comm.world_size > 1:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        comm.exchange(mine, right, theirs, left)
    comm.barrier()
    return str(comm.device), (mine + theirs)[0].item()


@needs.gpus(1)
def test_ranks_share_a_gpu_and_the_caller_never_initializes_cuda():
    found = run(add_neighbors, world_size=3, devices="cuda:0,cuda:0,cpu").values
    assert found == [("cuda:0", 2.0), ("cuda:0", 1.0), ("cpu", 3.0)]
    assert not torch.cuda.is_initialized()


@needs.gpus(2)
def test_each_rank_has_a_gpu_named_in_order_and_talks_over_nccl():
    def found(comm):
        return torch.distributed.get_backend(), *add_neighbors(comm)

    ranks = run(found, world_size=2, devices="cuda:1,cuda:0").values
    assert ranks == [("nccl", "cuda:1", 1.0), ("nccl", "cuda:0", 1.0)]


def sums(comm, num_elements):
    """The sums of both rings over a random tensor of this rank, which is the first."""
    mine = torch.randn(num_elements, device=comm.device)
    slow, fast = ring_all_reduce(comm, mine.clone()), fast_ring_all_reduce(comm, mine.clone())
    return [tensor.cpu() for tensor in (mine, slow, fast)]


@pytest.mark.parametrize("devices", [*needs.placed(2), *needs.placed(3)])
def test_the_rings_sum(devices):
    # Fewer elements than ranks: some chunks are empty.
    for num_elements in (1, 7, 5_000_000):
        found = run(sums, num_elements, world_size=len(devices.split(",")), devices=devices).values
        total = sum(mine.double() for mine, *_ in found)
        for _, slow, fast in found:
            assert torch.equal(slow, fast)
            assert torch.allclose(fast.double(), total, atol=1e-5)


def every_dtype(comm):
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for shape in [(), (0,), (3, 5)]:
            mine = torch.full(shape, comm.rank + 1, dtype=dtype, device=comm.device)
            theirs = torch.zeros_like(mine)
            comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
            assert theirs.tolist() == torch.full(shape, 2 - comm.rank, dtype=dtype).tolist()


@pytest.mark.parametrize("devices", needs.placed(2))
def test_every_type_and_shape_arrives(devices):
    run(every_dtype, world_size=2, devices=devices)


def both_receive(comm):
    comm.recv(torch.zeros(4, device=comm.device), 1 - comm.rank)


def one_dies(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(torch.zeros(2**22, device=comm.device), 1)


def takes_too_much(comm):
    if comm.rank == 0:
        torch.empty(2**50, dtype=torch.uint8, device=comm.device)
    comm.barrier()


@pytest.mark.parametrize("devices", needs.placed(2))
@pytest.mark.parametrize(
    ("fails", "error", "words"),
    [
        (both_receive, DeadlockError, "recv"),
        (one_dies, WorkerError, "rank 1"),
        (takes_too_much, WorkerError, "(?i)memory"),
    ],
)
def test_a_failure_is_explained_and_the_next_run_works(devices, fails, error, words):
    with pytest.raises(error, match=words):
        run(fails, world_size=2, devices=devices, timeout_s=60)
    assert [value for _, value in run(add_neighbors, world_size=2, devices=devices).values] == [
        1.0
    ] * 2


def free_bytes():
    """The memory of a GPU that nobody uses, asked by a process that then ends."""
    source = "import torch; print(torch.cuda.mem_get_info(0)[0])"
    asked = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True)
    return int(asked.stdout)


@needs.real
@needs.gpus(1)
def test_the_memory_is_back_after_a_killed_rank():
    def takes_a_gigabyte(comm):
        torch.ones(2**30, dtype=torch.uint8, device=comm.device)
        one_dies(comm)

    before = free_bytes()
    with pytest.raises(WorkerError):
        run(takes_a_gigabyte, world_size=2, devices="cuda:0,cuda:0", timeout_s=60)
    assert wait_until(lambda: free_bytes() > before - SLACK_BYTES, 30)
