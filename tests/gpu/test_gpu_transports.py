"""Every transport between GPUs: what arrives is what was sent, whatever its type and size."""

import needs
import pytest
import torch
from ranks import travel_by_value

from labkit import run
from labkit.collectives import fast_ring_all_reduce, ring_all_reduce, tree_all_reduce

travel_by_value(__name__)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8]
DTYPES += [torch.uint8, torch.bool, torch.complex64]


def over_every_transport(world_size):
    """(devices, transport): gloo, CUDA IPC and NCCL, where ranks share a GPU and do not."""
    for transport in ("gloo", "shared", "nccl"):
        for devices in needs.placed(world_size):
            name = f"{transport}, {devices.id}"
            yield pytest.param(*devices.values, transport, id=name, marks=devices.marks)


def rings(comm, num_elements):
    """The sums of both rings over random tensors of this rank, which must agree to the bit."""
    generator = torch.Generator().manual_seed(comm.rank)
    mine = torch.randn(num_elements, generator=generator).to(comm.device)
    slow, fast, tree = mine.clone(), mine.clone(), mine.clone()
    ring_all_reduce(comm, slow)
    fast_ring_all_reduce(comm, fast)
    tree_all_reduce(comm, tree)
    return [tensor.cpu().numpy() for tensor in (mine, slow, fast, tree)]


@pytest.mark.parametrize(
    ("devices", "transport"), [*over_every_transport(2), *over_every_transport(3)]
)
def test_the_rings_and_the_tree_sum(devices, transport):
    settings = {"world_size": len(devices.split(",")), "devices": devices, "transport": transport}
    # Fewer elements than ranks: some chunks are empty.
    for num_elements in (1, 7, 5_000_000):
        by_rank = run(rings, num_elements, **settings).values
        found = [[torch.from_numpy(array) for array in arrays] for arrays in by_rank]
        total = sum(mine.double() for mine, *_ in found)
        for _, slow, fast, tree in found:
            assert torch.equal(slow, fast)
            assert torch.allclose(fast.double(), total, atol=1e-5)
            assert torch.allclose(tree.double(), total, atol=1e-5)


def every_dtype(comm):
    """What arrives of tensors of all types and of odd shapes, beside what was sent."""
    found = []
    for dtype in DTYPES:
        for shape in [(), (0,), (1,), (3, 5), (2, 0, 4)]:
            mine = torch.full(shape, comm.rank + 1, dtype=dtype, device=comm.device)
            theirs = torch.zeros_like(mine)
            comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
            expected = torch.full(shape, 2 - comm.rank, dtype=dtype)
            found.append(theirs.tolist() == expected.tolist())
    # Not contiguous, on either side.
    square = torch.arange(12.0, device=comm.device).view(3, 4) + 100 * comm.rank
    landing = torch.zeros(4, 3, device=comm.device).t()
    if comm.rank == 0:
        comm.send(square.t().contiguous().t(), 1)
    else:
        theirs = torch.zeros(3, 4, device=comm.device)
        comm.recv(theirs, 0)
        landing.copy_(theirs)
        found.append(landing.tolist() == torch.arange(12.0).view(3, 4).tolist())
    return all(found), len(found)


@pytest.mark.parametrize(("devices", "transport"), list(over_every_transport(2)))
def test_every_type_and_shape_arrives(devices, transport):
    found = run(every_dtype, world_size=2, devices=devices, transport=transport).values
    assert found == [(True, 45), (True, 46)]


def in_order(comm):
    """All messages are sent before the first one is received: they keep their order."""
    sizes = (3, 70_000, 1, 3_000_000, 11)
    if comm.rank == 0:
        for number, size in enumerate(sizes):
            comm.send(torch.full((size,), float(number), device=comm.device), 1)
        return []
    found = []
    for size in sizes:
        landing = torch.zeros(size, device=comm.device)
        comm.recv(landing, 0)
        found.append(landing.unique().tolist())
    return found


@pytest.mark.parametrize(("devices", "transport"), list(over_every_transport(2)))
def test_messages_keep_their_order(devices, transport):
    found = run(in_order, world_size=2, devices=devices, transport=transport).values
    assert found[1] == [[0.0], [1.0], [2.0], [3.0], [4.0]]


def from_anyone(comm):
    if comm.rank:
        comm.send(torch.full((1000,), float(comm.rank), device=comm.device), 0)
        return None
    landing, found = torch.zeros(1000, device=comm.device), []
    for _ in range(comm.world_size - 1):
        source = comm.recv_any(landing, range(1, comm.world_size))
        found.append(landing.unique().tolist() == [float(source)] and source)
    return sorted(found)


@pytest.mark.parametrize(("devices", "transport"), list(over_every_transport(3)))
def test_messages_from_any_rank(devices, transport):
    found = run(from_anyone, world_size=3, devices=devices, transport=transport).values
    assert found[0] == [1, 2]


@pytest.mark.parametrize(("devices", "transport"), list(over_every_transport(3)))
def test_what_arrives_is_added_on_the_gpu(devices, transport):
    def add_up(comm, num_elements):
        own = torch.full((num_elements,), 10.0**comm.rank, device=comm.device)
        if comm.rank:
            comm.send(own, 0)
        else:
            comm.recv_add(comm.recv_add(own, 1), 2)
        return own[-1].item()

    for num_elements in (3_000_000, 7):
        settings = {"world_size": 3, "devices": devices, "transport": transport}
        assert run(add_up, num_elements, **settings).values == [111, 10, 100]


@needs.gpus(1)
def test_a_rank_on_the_gpu_talks_to_one_on_the_cpu():
    def swap(comm):
        mine = torch.full((1000,), float(comm.rank), device=comm.device)
        theirs = torch.zeros_like(mine)
        comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
        return comm.device.type, theirs[-1].item()

    found = run(swap, world_size=2, devices="cuda:0,cpu").values
    assert found == [("cuda", 1.0), ("cpu", 0.0)]
