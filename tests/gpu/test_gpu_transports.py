"""Messages between GPUs, over gloo and over NCCL: what arrives is what was sent."""

import needs
import pytest
import torch
from ranks import travel_by_value

from labkit import run
from labkit.collectives import fast_ring_all_reduce, ring_all_reduce, tree_all_reduce

travel_by_value(__name__)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8]
DTYPES += [torch.uint8, torch.bool, torch.complex64]


def sums(comm, num_elements):
    """The sums of both rings and of the tree over random tensors of this rank."""
    generator = torch.Generator().manual_seed(comm.rank)
    mine = torch.randn(num_elements, generator=generator).to(comm.device)
    slow, fast, tree = mine.clone(), mine.clone(), mine.clone()
    ring_all_reduce(comm, slow)
    fast_ring_all_reduce(comm, fast)
    tree_all_reduce(comm, tree)
    return [tensor.cpu().numpy() for tensor in (mine, slow, fast, tree)]


@pytest.mark.parametrize("devices", [*needs.placed(2), *needs.placed(3)])
def test_the_rings_and_the_tree_sum(devices):
    # Fewer elements than ranks: some chunks are empty.
    for num_elements in (1, 7, 5_000_000):
        by_rank = run(sums, num_elements, world_size=len(devices.split(",")), devices=devices)
        found = [[torch.from_numpy(array) for array in arrays] for arrays in by_rank.values]
        total = sum(mine.double() for mine, *_ in found)
        for _, slow, fast, tree in found:
            assert torch.equal(slow, fast)
            assert torch.allclose(fast.double(), total, atol=1e-5)
            assert torch.allclose(tree.double(), total, atol=1e-5)


def every_dtype(comm):
    found = []
    for dtype in DTYPES:
        for shape in [(), (0,), (1,), (3, 5), (2, 0, 4)]:
            mine = torch.full(shape, comm.rank + 1, dtype=dtype, device=comm.device)
            theirs = torch.zeros_like(mine)
            comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
            expected = torch.full(shape, 2 - comm.rank, dtype=dtype)
            found.append(theirs.tolist() == expected.tolist())
    return all(found)


@pytest.mark.parametrize("devices", needs.placed(2))
def test_every_type_and_shape_arrives(devices):
    assert run(every_dtype, world_size=2, devices=devices).values == [True, True]


def from_anyone(comm):
    own = torch.full((3_000_000,), 10.0**comm.rank, device=comm.device)
    if comm.rank:
        comm.send(own, 0)
        comm.send(own, 0)
        return None
    comm.recv_add(comm.recv_add(own, 1), 2)
    landing = torch.zeros_like(own)
    sources = [comm.recv_any(landing, (1, 2)) for _ in range(2)]
    return own[-1].item(), sorted(sources), landing[-1].item() == 10.0 ** sources[-1]


@pytest.mark.parametrize("devices", needs.placed(3))
def test_messages_are_added_and_come_from_any_rank(devices):
    assert run(from_anyone, world_size=3, devices=devices).values[0] == (111, [1, 2], True)


@needs.gpus(1)
def test_a_rank_on_the_gpu_talks_to_one_on_the_cpu():
    def swap(comm):
        mine = torch.full((1000,), float(comm.rank), device=comm.device)
        theirs = torch.zeros_like(mine)
        comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
        return comm.device.type, theirs[-1].item()

    found = run(swap, world_size=2, devices="cuda:0,cpu").values
    assert found == [("cuda", 1.0), ("cpu", 0.0)]
