"""DDP from scratch: the gradients of one device and of PyTorch's DDP, whatever the model."""

import contextlib
from functools import partial

import pytest
import torch
from fifo_transport import over_streams  # noqa: F401  (a fixture)
from odd_models import Tied, seeded, sgd, some_batches
from ranks import travel_by_value
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from labkit import run, strategies
from labkit.costs.traffic import NOTHING, broadcast_cost, ring_all_reduce_cost
from labkit.strategies.ddp.bucketed import BucketedDDP
from labkit.strategies.ddp.naive import NaiveDDP
from labkit.training.state import checksum, largest_difference
from labkit.workload.sampling import share

travel_by_value(__name__)

DDP = strategies.get("ddp")
# Of a model with 100 to 200 float64 parameters: a few buckets.
TINY_MB = 300 / 2**20


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


def frozen():
    model = plain()
    model[2].weight.requires_grad_(False)
    return model


class Sometimes(nn.Module):
    """``branch`` is used by samples whose first feature is above 100 alone; ``never`` by none."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branch, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, inputs):
        outputs = self.trunk(inputs)
        return outputs + self.branch(inputs) if (inputs[:, 0] > 100).any() else outputs


def with_batch_norm():
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6)]
    return nn.Sequential(*layers)


CASES = {
    "one bucket": (plain, {}),
    "a bucket a parameter": (plain, {"bucket_mb": 0}),
    "some buckets": (plain, {"bucket_mb": TINY_MB}),
    "micro-batches": (plain, {"bucket_mb": TINY_MB, "accumulate": 3}),
    "tied": (Tied, {"bucket_mb": 0}),
    "frozen": (frozen, {"bucket_mb": TINY_MB}),
    "unused": (Sometimes, {"bucket_mb": TINY_MB}),
}


def train_all(comm, make_strategy, own_options=True):
    """By case, the state after three updates."""
    states = {}
    for name, (make_model, options) in CASES.items():
        strategy = make_strategy(**options) if own_options else make_strategy()
        strategy.setup(comm, seeded(make_model), sgd)
        for inputs, targets in some_batches():
            mine = share(torch.arange(len(targets)), *strategy.share())
            strategy.step(inputs[mine], targets[mine], len(targets))
        strategy.end_epoch()
        states[name] = strategy.full_state()
    return states


@pytest.fixture(scope="module")
def alone():
    return run(train_all, strategies.get("single"), False, world_size=1).values[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_one_device(alone, world_size):
    """Shares of 7, 5 and 2 samples: none divides by 3 or 4, and some ranks have none at all."""
    by_rank = run(train_all, DDP, world_size=world_size).values
    for name, expected in alone.items():
        states = [states[name] for states in by_rank]
        assert len({checksum(state) for state in states}) == 1, name
        assert largest_difference(states[0], expected) < 1e-10, name


@pytest.mark.usefixtures("over_streams")
def test_over_a_stream_that_queues(alone):
    test_equals_one_device(alone, 3)


# What one run with two ranks finds out; the tests look at its parts.


def found_by_all(comm, functions):
    return {function.__name__: function(comm) for function in functions}


def by_rank(function, runs):
    return [found[function.__name__] for found in runs.values]


@pytest.fixture(scope="module")
def two_ranks():
    functions = (
        beside_pytorch,
        statistics,
        after_an_interruption,
        under_no_sync,
    )
    return run(found_by_all, functions, world_size=2)


def beside_pytorch(comm):
    states = []
    wraps = [
        lambda model: DistributedDataParallel(model),
        lambda model: BucketedDDP(comm, model, bucket_mb=TINY_MB),
        lambda model: NaiveDDP(comm, model),
    ]
    for wrap in wraps:
        model = wrap(seeded(with_batch_norm))
        optimizer = sgd(model.parameters())
        for inputs, targets in some_batches((8, 8, 8)):
            mine = [*zip(inputs.chunk(4), targets.chunk(4))][2 * comm.rank :][:2]
            optimizer.zero_grad()
            with model.no_sync():
                functional.cross_entropy(model(mine[0][0]), mine[0][1]).backward()
            functional.cross_entropy(model(mine[1][0]), mine[1][1]).backward()
            optimizer.step()
        states.append(model.module.state_dict())
    return states


def test_equals_pytorchs_ddp_with_batch_norm(two_ranks):
    """Parameters and rank 0's statistics, with micro-batches under no_sync, too."""
    theirs, bucketed, naive = by_rank(beside_pytorch, two_ranks)[0]
    assert theirs["1.num_batches_tracked"] == 6
    assert largest_difference(bucketed, theirs) < 1e-10
    assert largest_difference(naive, theirs) < 1e-10


def statistics(comm):
    strategy = DDP()
    strategy.setup(comm, seeded(with_batch_norm), sgd)
    for inputs, targets in some_batches((9, 6)):
        mine = share(torch.arange(len(targets)), *strategy.share())
        strategy.step(inputs[mine], targets[mine], len(targets))
    apart = strategy.full_state()["1.running_mean"]
    strategy.end_epoch()
    return apart, strategy.full_state()


def test_rank_0s_buffers_reach_all_replicas(two_ranks):
    (first, state), (second, other) = by_rank(statistics, two_ranks)
    assert not torch.equal(first, second)
    assert torch.equal(state["1.running_mean"], first)
    assert checksum(state) == checksum(other)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the disk of rank 1 is full")


def own_inputs(comm):
    return torch.full((2, 6), comm.rank + 1.0, dtype=torch.float64)


def gradients_of(replica, inputs):
    replica.zero_grad()
    replica(inputs).square().sum().backward()
    return [p.grad for p in replica.parameters()]


def expected_gradients():
    """The mean over two ranks, with ``own_inputs``."""
    model = seeded(plain)
    inputs = torch.ones(2, 6, dtype=torch.float64)
    ((model(inputs).square().sum() + model(2 * inputs).square().sum()) / 2).backward()
    return [p.grad for p in model.parameters()]


def is_mean(gradients):
    pairs = zip(gradients, expected_gradients(), strict=True)
    return all(torch.allclose(mine, due, rtol=1e-10) for mine, due in pairs)


def after_an_interruption(comm):
    found = []
    for make_replica in (NaiveDDP, partial(BucketedDDP, bucket_mb=0)):
        replica = make_replica(comm, seeded(plain))
        # The last layer's gradients are on their way when backward raises.
        hidden = Breaks.apply(replica.module[:4](own_inputs(comm)))
        with contextlib.suppress(RuntimeError):
            replica.module[4](hidden).sum().backward()
        found.append(is_mean(gradients_of(replica, own_inputs(comm))))
    return found


def test_a_backward_that_raised_on_all_ranks_leaves_the_next_one_right(two_ranks):
    assert by_rank(after_an_interruption, two_ranks) == [[True, True]] * 2


def under_no_sync(comm):
    replica = BucketedDDP(comm, seeded(plain), bucket_mb=0)
    before = comm.messages
    with replica.no_sync():
        if comm.rank:
            replica.without_samples()
        else:
            replica(own_inputs(comm)).square().sum().backward()
    sent = comm.messages - before
    if comm.rank:
        replica(own_inputs(comm)).square().sum().backward()
    else:
        replica.without_samples()
    return sent, is_mean([p.grad for p in replica.parameters()])


def test_a_rank_without_samples_keeps_quiet_under_no_sync_too(two_ranks):
    assert by_rank(under_no_sync, two_ranks) == [(0, True)] * 2


def counted(comm):
    found = []
    for bucket_mb in (25, TINY_MB):
        replica = BucketedDDP(comm, seeded(with_batch_norm), bucket_mb=bucket_mb)
        before, started = (comm.messages, comm.bytes_sent), len(comm.session.recorder.spans())
        for inputs, _ in some_batches((4, 4, 4)):
            replica.zero_grad()
            replica(inputs).sum().backward()
        used = comm.messages - before[0], comm.bytes_sent - before[1]
        sizes = [sum(p.numel() for p in b.parameters) for b in replica.buckets]
        lanes = {span.lane for span in comm.session.recorder.spans()[started:]}
        found.append((sizes, used, lanes))
    return found


def test_traffic_equals_the_formula_and_the_line_has_a_lane_of_its_own():
    # Running mean and variance of 8 and of 6 features, and two counters.
    buffers = [2 * (8 + 6) * 8, 2 * 8]
    for rank, found in enumerate(run(counted, world_size=3).values):
        for sizes, used, _ in found:
            # Before the first forward no buffers are sent.
            costs = [ring_all_reduce_cost(size, 8, 3, rank) for size in sizes] * 3
            costs += [broadcast_cost(num_bytes, 1, 3, rank) for num_bytes in buffers] * 2
            expected = sum(costs, start=NOTHING)
            assert used == (expected.messages, expected.num_bytes)
        assert [len(sizes) > 1 for sizes, _, _ in found] == [False, True]
        # One bucket has nothing to run beside: whoever waits for it carries it out.
        assert [lanes for _, _, lanes in found] == [{0}, {0, 1}]
