"""DDP from scratch: the gradients of one device and of PyTorch's DDP, whatever the model."""

import time
from functools import partial

import pytest
import torch
from ranks import travel_by_value
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from labkit import WorkerError, run, strategies, train_with
from labkit.costs import NOTHING, Cost, ddp_update_cost
from labkit.replicas import BucketedDDP, NaiveDDP
from labkit.train import checksum, largest_difference
from labkit.workload import share

travel_by_value(__name__)

DDP = strategies.get("ddp")
# Of a model with 100 to 200 float64 parameters: a few buckets.
TINY_MB = 300 / 2**20


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs)))


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


def seeded(make_model):
    torch.manual_seed(0)
    return make_model().double()


def some_batches(sizes=(7, 5, 2)):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64),
            torch.randint(6, (n,), generator=generator),
        )
        for n in sizes
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_device(alone, world_size):
    """Shares of 7, 5 and 2 samples: none divides by 3 or 4, and some ranks have none at all."""
    by_rank = run(train_all, DDP, world_size=world_size).values
    for name, expected in alone.items():
        states = [states[name] for states in by_rank]
        assert len({checksum(state) for state in states}) == 1, name
        assert largest_difference(states[0], expected) < 1e-10, name


def test_equals_pytorchs_ddp_with_batch_norm():
    """Parameters and rank 0's statistics, with micro-batches under no_sync, too."""

    def train(comm):
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

    theirs, bucketed, naive = run(train, world_size=2).values[0]
    assert theirs["1.num_batches_tracked"] == 6
    assert largest_difference(bucketed, theirs) < 1e-10
    assert largest_difference(naive, theirs) < 1e-10


def test_rank_0s_buffers_reach_all_replicas():
    def train(comm):
        strategy = DDP()
        strategy.setup(comm, seeded(with_batch_norm), sgd)
        for inputs, targets in some_batches((9, 6)):
            mine = share(torch.arange(len(targets)), *strategy.share())
            strategy.step(inputs[mine], targets[mine], len(targets))
        apart = strategy.full_state()["1.running_mean"]
        strategy.end_epoch()
        return apart, strategy.full_state()

    (first, state), (second, other) = run(train, world_size=2).values
    assert not torch.equal(first, second)
    assert torch.equal(state["1.running_mean"], first)
    assert checksum(state) == checksum(other)


@pytest.mark.parametrize("make_replica", [NaiveDDP, partial(BucketedDDP, bucket_mb=0)])
def test_what_a_rank_has_not_used_counts_as_zero(make_replica):
    def gradients(comm, make_replica):
        found = []
        for find_unused in (False, True):
            replica = make_replica(comm, seeded(Sometimes), find_unused=find_unused)
            inputs = torch.ones(2, 6, dtype=torch.float64)
            inputs[:, 0] += 200 * (comm.rank == 1)
            replica(inputs).sum().backward()
            found.append({name: p.grad for name, p in replica.module.named_parameters()})
        return found

    by_rank = run(gradients, make_replica, world_size=3).values
    for counted, told in by_rank:
        # Two samples on one of three ranks, averaged over the ranks.
        assert torch.equal(counted["branch.bias"], torch.full((6,), 2 / 3, dtype=torch.float64))
        assert torch.equal(counted["never.bias"], torch.zeros(6, dtype=torch.float64))
        assert torch.equal(told["branch.bias"], counted["branch.bias"])
        assert told["never.bias"] is None
        assert told["never.weight"] is None


def test_replicas_start_as_rank_0s_and_gradients_may_be_zeroed_in_place():
    def gradients(comm):
        torch.manual_seed(comm.rank)
        replica = BucketedDDP(comm, plain().double(), bucket_mb=TINY_MB, op="sum")
        start = replica.module.state_dict()
        found = []
        for inputs, _ in some_batches((4, 4)):
            replica.zero_grad(set_to_none=False)
            replica(inputs).sum().backward()
            found.append([p.grad.clone() for p in replica.parameters()])
        return start, found

    def expected():
        model = plain().double()
        model.load_state_dict(start)
        for inputs, _ in some_batches((4, 4)):
            model.zero_grad()
            model(inputs).sum().backward()
            yield [2 * p.grad for p in model.parameters()]

    (start, found), (others_start, _) = run(gradients, world_size=2).values
    assert checksum(start) == checksum(others_start)
    torch.testing.assert_close(found, list(expected()), rtol=1e-10, atol=0)


def test_traffic_equals_the_formula_and_the_line_has_a_lane_of_its_own():
    def counted(comm):
        found = []
        for bucket_mb in (25, TINY_MB):
            replica = BucketedDDP(comm, seeded(with_batch_norm), bucket_mb=bucket_mb)
            before = comm.messages, comm.bytes_sent
            for inputs, _ in some_batches((4, 4, 4)):
                replica.zero_grad()
                replica(inputs).sum().backward()
            used = comm.messages - before[0], comm.bytes_sent - before[1]
            sizes = [sum(p.numel() for p in b.parameters) for b in replica.buckets]
            found.append((sizes, used, {span.lane for span in comm.spans()}))
        return found

    # Running mean and variance of 8 and of 6 features, and two counters.
    buffers = [2 * (8 + 6) * 8, 2 * 8]
    for rank, found in enumerate(run(counted, world_size=3).values):
        for sizes, used, _ in found:
            gradients = ddp_update_cost(sizes, 8, 3, rank)
            with_buffers = ddp_update_cost(sizes, 8, 3, rank, buffers)
            # Nothing is behind before the first forward.
            costs = [gradients, with_buffers, with_buffers]
            expected = sum(costs, start=NOTHING)
            assert used == (expected.messages, expected.num_bytes)
        assert [len(sizes) > 1 for sizes, _, _ in found] == [False, True]
        # One bucket has nothing to run beside: whoever waits for it carries it out.
        assert [lanes for _, _, lanes in found] == [{0}, {0, 1}]


def test_bytes_and_messages_of_a_training_run_equal_the_formula():
    settings = {"world_size": 3, "batch_size": 35, "train_size": 177, "bucket_mb": 0}
    result = train_with("ddp", **settings)
    sizes = [tensor.numel() for tensor in result.state.values()]
    costs = [ddp_update_cost(sizes, 4, 3, rank) for rank in range(3)]
    steps = 6
    assert result.bytes_sent == [steps * cost.num_bytes for cost in costs]
    assert result.messages == [steps * cost.messages for cost in costs]


def test_buckets_change_the_messages_and_not_the_bytes():
    assert ddp_update_cost([8], 4, 2) == Cost(2, 2, 32)
    assert ddp_update_cost([4, 4], 4, 2) == Cost(4, 4, 32)
    assert ddp_update_cost([8], 4, 2, buffer_bytes=[10]) == Cost(3, 3, 42)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the disk of rank 1 is full")


def test_a_rank_that_fails_in_backward_ends_the_run():
    def step(comm):
        replica = BucketedDDP(comm, plain(), bucket_mb=0)
        hidden = replica.module[:4](torch.ones(2, 6))
        # The last layer's buckets are on their way when rank 1 fails.
        outputs = replica.module[4](Breaks.apply(hidden) if comm.rank == 1 else hidden)
        outputs.sum().backward()

    start_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1.*the disk of rank 1 is full"):
        run(step, world_size=3)
    assert time.monotonic() - start_s < 60


def test_ranks_with_other_buckets_are_told_what_differs():
    def step(comm):
        replica = BucketedDDP(comm, plain(), bucket_mb=0 if comm.rank else TINY_MB)
        replica(torch.ones(2, 6)).sum().backward()

    with pytest.raises(WorkerError, match=r"(?s)different collectives.*\[126\].*\[6, 8\]"):
        run(step, world_size=2)


def test_an_error_in_the_thread_is_raised_by_the_learners_backward():
    def step(comm):
        replica = BucketedDDP(comm, plain(), bucket_mb=0, op="median")
        replica(torch.ones(2, 6)).sum().backward()

    with pytest.raises(WorkerError) as caught:
        run(step, world_size=2)
    assert "ValueError: unknown operation 'median'" in str(caught.value)
    assert ".sum().backward()" in str(caught.value)


def test_a_model_without_anything_to_train_is_refused():
    model = plain().requires_grad_(False)
    with pytest.raises(WorkerError, match="ValueError: no parameter of this model requires"):
        run(lambda comm: NaiveDDP(comm, model), world_size=1)
