"""Micro-batches, mixed precision and stragglers: what they change, and what they must not."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from odd_models import sgd
from ranks import travel_by_value
from torch import nn

from labkit import run, strategies, train_with
from labkit.strategies import local_gradients
from labkit.strategies.local_gradients import LocalGradients
from labkit.training.state import checksum
from labkit.workload.sampling import share

travel_by_value(__name__)

SMALL = {"epochs": 1, "train_size": 107, "lr": 0.02, "batch_size": 35, "model": "mlp"}
RING = strategies.get("ring_all_reduce")
TORCH_DDP = strategies.get("ring_all_reduce", builtin=True)


def test_accumulation_equals_the_large_batch_and_costs_no_message():
    # Shares of 35, 18, 17 and 2 samples in 4 micro-batches: 9 + 9 + 9 + 8, ..., 1 + 1.
    settings = SMALL | {"dtype": "float64"}
    whole = train_with("single", **settings)
    parts = train_with("single", accumulate=4, **settings)
    ring = train_with("ring_all_reduce", world_size=2, **settings)
    parts_on_ring = train_with("ring_all_reduce", world_size=2, accumulate=4, **settings)
    assert 0 < parts.difference_from(whole) < parts.tolerance(whole)
    assert parts_on_ring.difference_from(whole) < parts_on_ring.tolerance(whole)
    assert parts_on_ring.replicas_agree
    assert parts_on_ring.messages == ring.messages
    assert parts_on_ring.bytes_sent == ring.bytes_sent
    assert len(whole.trace.of(0, "compute")) == 4
    assert len(parts.trace.of(0, "compute")) == 4 + 4 + 4 + 2


def syncs_of_ddp(comm, accumulate):
    """How often PyTorch's DDP reduces a bucket in one update, and the bits that it ends with."""
    torch.manual_seed(0)
    strategy = TORCH_DDP(accumulate=accumulate)
    strategy.setup(comm, nn.Linear(6, 6).double(), sgd)
    buckets = []

    def count(_, bucket):
        buckets.append(bucket.index())
        summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return summed.then(lambda done: done.value()[0] / comm.world_size)

    strategy.replica.register_comm_hook(None, count)
    inputs, targets = torch.randn(5, 6).double(), torch.arange(5)
    mine = share(torch.arange(5), *strategy.share())
    strategy.step(inputs[mine], targets[mine], 5)
    return len(buckets), strategy.full_state()["weight"]


def each_sync_of_ddp(comm):
    return [syncs_of_ddp(comm, accumulate) for accumulate in (1, 2, 3)]


def test_pytorchs_ddp_synchronises_once_an_update():
    # Three samples and two, so that with accumulate 3 one rank has more micro-batches.
    for found in run(each_sync_of_ddp, world_size=2, device="cpu").values:
        assert [count for count, _ in found] == [1, 1, 1]
        for _, weight in found:
            torch.testing.assert_close(weight, found[0][1], rtol=1e-12, atol=0)


def test_bf16_learns_as_float32_does():
    settings = {"epochs": 4, "model": "mlp"}
    full = train_with("single", **settings)
    half = train_with("ring_all_reduce", world_size=2, amp="bf16", **settings)
    assert half.replicas_agree
    assert half.difference_from(full) > 1e-4
    assert half.test_accuracy == pytest.approx(full.test_accuracy, abs=0.02)
    assert half.epochs[-1]["loss"] == pytest.approx(full.epochs[-1]["loss"], rel=0.05)
    assert {tensor.dtype for tensor in half.state.values()} == {torch.float32}


def train_through_an_overflow(comm, make_strategy):
    """Three updates, of which the second overflows on the last rank alone."""
    torch.manual_seed(0)
    strategy = make_strategy(amp="fp16")
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    # Steps so small that the large sample, too, is far from sure of its class.
    strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=1e-7, momentum=0.9))
    found = []
    for largest in (1.0, 6e4, 1.0):
        # A first batch of one sample: the other ranks have none.
        samples = comm.world_size if found else 1
        inputs, targets = torch.ones(samples, 4), torch.arange(samples) % 3
        inputs[-1] *= largest
        mine = share(torch.arange(samples), *strategy.share())
        strategy.step(inputs[mine], targets[mine], samples)
        found.append((strategy.full_state(), strategy.gradients.scaler.get_scale()))
    return found


@pytest.mark.parametrize("make_strategy", [RING, TORCH_DDP], ids=["ring", "torch"])
def test_an_overflow_of_fp16_on_one_rank_skips_the_update_on_all(make_strategy):
    ranks = run(train_through_an_overflow, make_strategy, world_size=2, device="cpu").values
    for (first, scale), (second, halved), (third, kept) in ranks:
        assert checksum(second) == checksum(first)
        assert halved == scale / 2 == kept
        # Momentum was not lost: one more update moves on, and nothing is NaN.
        assert checksum(third) != checksum(second)
        assert all(tensor.isfinite().all() for tensor in third.values())
    assert len({checksum(state) for *_, (state, _) in ranks}) == 1


def test_fp16_learns_on_two_ranks():
    result = train_with("ring_all_reduce", world_size=2, amp="fp16", epochs=4, model="mlp")
    assert result.replicas_agree
    assert result.test_accuracy > 0.9


def test_a_straggler_sleeps_for_the_rest_of_its_factor(monkeypatch):
    naps = []
    # The first micro-batch, two of 3 samples, a pause of the system, one of 6 samples.
    times_s = [0.0, *(10.0, 12.0), *(20.0, 22.0), *(30.0, 130.0), *(200.0, 204.0)]
    device = torch.device("cpu")
    for rank in (0, 1):
        clock = iter(times_s)
        fake = SimpleNamespace(perf_counter=lambda clock=clock: next(clock), sleep=naps.append)
        monkeypatch.setattr(local_gradients, "time", fake)
        comm = SimpleNamespace(rank=rank, device=device, span=lambda kind: nullcontext())
        gradients = LocalGradients(comm, nn.Linear(2, 2), straggler=(0, 4.0))
        for count in (3, 3, 3, 3, 6):
            gradients.add(torch.ones(count, 2), torch.zeros(count, dtype=torch.long))
    assert naps == pytest.approx([6.0, 6.0, 6.0, 12.0])


def test_a_straggler_without_samples_does_not_sleep(monkeypatch):
    monkeypatch.setattr(local_gradients.time, "sleep", lambda _: pytest.fail("it slept"))
    comm = SimpleNamespace(rank=0, device=torch.device("cpu"), span=lambda kind: nullcontext())
    gradients = LocalGradients(comm, nn.Linear(2, 2), straggler=(0, 4.0))
    for _ in range(3):
        empty = torch.ones(0, 2), torch.zeros(0, dtype=torch.long)
        gradients.add(*empty, even_if_empty=True)
