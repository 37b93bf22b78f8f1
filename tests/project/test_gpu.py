"""What only a machine with a GPU can show; one GPU is enough. Skipped elsewhere."""

import pytest
import torch
from ranks import travel_by_value

from labkit import run, train_with
from labkit.collectives import fast_ring_all_reduce, ring_all_reduce

travel_by_value(__name__)

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 0, reason="no CUDA GPU on this machine"
)


def add_neighbours(comm):
    mine = torch.full((1000,), float(comm.rank), device=comm.device)
    theirs = torch.empty_like(mine)
    with comm.span("compute"):
        mine = mine * 2
    if comm.world_size > 1:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        comm.exchange(mine, right, theirs, left)
    comm.barrier()
    return (mine + theirs)[0].item() if comm.world_size > 1 else mine[0].item()


def test_one_rank_has_the_gpu_over_nccl_and_event_times():
    result = run(add_neighbours, world_size=1, device="cuda")
    assert result.values == [0.0]
    (compute,) = result.trace.of(0, "compute")
    assert 0 < compute.duration_s < 10
    assert not torch.cuda.is_initialized(), "the caller must never initialise CUDA"


def test_ranks_that_share_a_gpu_talk_over_gloo():
    world_size = torch.cuda.device_count() + 1
    result = run(add_neighbours, world_size=world_size, device="cuda")
    expected = [2.0 * rank + 2.0 * ((rank - 1) % world_size) for rank in range(world_size)]
    assert result.values == expected
    assert result.bytes_sent == [4000] * world_size


def rings(comm, num_elements):
    """The sums of both rings over random tensors of this rank, which must agree to the bit."""
    generator = torch.Generator().manual_seed(comm.rank)
    mine = torch.randn(num_elements, generator=generator).to(comm.device)
    slow, fast = mine.clone(), mine.clone()
    ring_all_reduce(comm, slow)
    fast_ring_all_reduce(comm, fast)
    return mine, slow, fast


@pytest.mark.parametrize("world_size", [2, 4])
def test_cuda_ipc_between_ranks_of_one_machine(world_size):
    for num_elements in (7, 5_000_000):
        result = run(rings, num_elements, world_size=world_size, device="cuda", transport="shared")
        total = sum(mine.double() for mine, *_ in result.values)
        for _, slow, fast in result.values:
            assert torch.equal(slow, fast)
            assert torch.allclose(fast.double(), total, atol=1e-5)


def test_it_still_works_after_the_caller_has_initialised_cuda():  # row 23
    torch.ones(1, device="cuda")
    assert run(add_neighbours, world_size=1, device="cuda").values == [0.0]


@pytest.mark.parametrize("builtin", [False, True])
@pytest.mark.parametrize("strategy", ["ring_all_reduce", "parameter_server"])
def test_training_on_a_gpu_equals_one_device(strategy, builtin):
    settings = {"device": "cuda", "dtype": "float64", "batch_size": 35, "train_size": 177}
    alone = train_with("single", **settings)
    result = train_with(strategy, world_size=3, builtin=builtin, **settings)
    assert result.difference_from(alone) < result.tolerance(alone)
    assert result.replicas_agree


def test_what_arrives_is_added_on_the_gpu():
    def add_up(comm, num_elements):
        own = torch.full((num_elements,), 10.0**comm.rank, device=comm.device)
        if comm.rank:
            comm.send(own, 0)
        else:
            comm.recv_add(comm.recv_add(own, 1), 2)
        return own[-1].item()

    for transport in ("shared", "gloo"):
        options = {"world_size": 3, "device": "cuda", "transport": transport}
        assert run(add_up, 3_000_000, **options).values == [111, 10, 100]
        assert run(add_up, 7, **options).values == [111, 10, 100]


def test_replicas_in_threads_end_where_one_gpu_ends():
    settings = {"epochs": 1, "train_size": 107, "batch_size": 35, "dtype": "float64"}
    one = train_with("single", device="cuda", **settings)
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    # A GPU may hold two replicas of ours, and one of PyTorch's.
    ours = train_with("data_parallel", devices=",".join([*gpus, gpus[0]]), **settings)
    torchs = train_with("data_parallel", builtin=True, devices=",".join(gpus), **settings)
    assert ours.difference_from(one) < ours.tolerance(one)
    assert torchs.difference_from(one) < torchs.tolerance(one)
    assert torchs.notes["replicas"] == len(gpus)


@pytest.mark.parametrize("devices", ["cuda:0,cpu", "cpu,cuda:0"])
def test_a_model_between_card_and_host_equals_one_device_and_its_hops_are_timed_by_events(devices):
    settings = {"model": "small_cnn", "batch_size": 64, "train_size": 256}
    placed = train_with("model_parallel", devices=devices, split_points="3", **settings)
    single = train_with("single", device="cpu", **settings)
    assert placed.difference_from(single) < 1e-4  # the card sums in another order
    hops = {hop["direction"]: hop for hop in placed.notes["hops"]}
    assert hops.keys() == {"forward", "backward"}
    for hop in hops.values():
        assert hop["num_bytes"] == 64 * 32 * 16 * 4
        assert 0 < hop["median_s"] < 1


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_stages_that_share_a_gpu_train_as_one(transport):
    settings = {"model": "small_cnn", "batch_size": 64, "train_size": 256, "device": "cuda"}
    single = train_with("single", **settings)
    for strategy, options in (("model_parallel", {}), ("pipeline", {"micro_batches": 3})):
        world_size = torch.cuda.device_count() + 1
        split = train_with(
            strategy, world_size=world_size, transport=transport, **settings, **options
        )
        assert split.difference_from(single) < 1e-4
