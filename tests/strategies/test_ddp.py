"""DDP from scratch: as PyTorch's, also under no_sync; its traffic, and what overlaps with what.

Local SGD: as the same updates made one rank after the other.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from odd_models import Everything, seeded, sgd, some_batches
from ranks import broadcast_cost
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from labkit import run
from labkit.costs.traffic import Cost, ring_all_reduce_cost
from labkit.schedules.bucket_assignment import MIB
from labkit.strategies.ddp import DDP, BucketedDDP, NaiveDDP, OuterStep
from labkit.training.resolve import find_technique
from labkit.training.result import checksum, largest_difference
from labkit.workload.samples import share

# Of a model with 100 to 200 float64 parameters: a few buckets.
TINY_MB = 300 / 2**20


def with_batch_norm():
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6)]
    return nn.Sequential(*layers)


def beside_pytorch(comm):
    states = []
    wraps = DistributedDataParallel, partial(BucketedDDP, comm, bucket_mb=TINY_MB)
    for wrap in (*wraps, partial(NaiveDDP, comm)):
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


def test_equals_pytorchs_ddp_with_batch_norm():
    """Parameters and rank 0's statistics, with micro-batches under no_sync, too."""
    (theirs, *ours), (_, *others) = run(beside_pytorch, world_size=2).values
    assert theirs["1.num_batches_tracked"] == 6
    for mine, other in zip(ours, others):
        assert largest_difference(mine, theirs) < 1e-10
        # Ours has rank 0's statistics after each step, PyTorch's before the next one.
        assert largest_difference(mine, other) == 0


def bucket_bytes(replica):
    """By step the bytes of the buckets that PyTorch's DDP sends."""
    steps = []

    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        steps[-1].append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, hook)
    for _ in range(3):
        steps.append([])
        replica(torch.randn(2, 512)).sum().backward()
    return steps


def wide_model():
    """Five layers of 1 MiB each, without biases."""
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(5)])


def builtin_buckets(comm):
    plain = bucket_bytes(DistributedDataParallel(wide_model()))
    by_size = {}
    for options in ({}, {"bucket_mb": 2}, {"bucket_mb": 0}):
        strategy = find_technique("ddp", builtin=True)(**options)
        strategy.setup(comm, wide_model(), sgd)
        by_size[options.get("bucket_mb")] = bucket_bytes(strategy.module)
    return plain, by_size


def test_builtin_ddp_has_the_buckets_of_pytorchs_default():
    """Also its small first bucket, and one for everything in the first step."""
    plain, by_size = run(builtin_buckets, world_size=1).values[0]
    assert plain == [[5 * MIB], [MIB, 4 * MIB], [MIB, 4 * MIB]]
    assert by_size[None] == plain
    assert by_size[2][-1] == [MIB, 2 * MIB, 2 * MIB]
    assert by_size[0][-1] == [MIB] * 5


def counted(comm):
    found = []
    for bucket_mb in (25, TINY_MB):
        model = seeded(with_batch_norm)
        # The first gradients come from a backward inside the backward, which ends before it.
        model[4].forward = partial(checkpoint, model[4].forward, use_reentrant=True)
        replica = BucketedDDP(comm, model, bucket_mb=bucket_mb)
        before, started = (comm.messages, comm.bytes_sent), len(comm.session.recorder.spans())
        for inputs, _ in some_batches((4, 4, 4)):
            replica.zero_grad()
            replica(inputs).sum().backward()
        used = comm.messages - before[0], comm.bytes_sent - before[1]
        sizes = [bucket.flat.numel() for bucket in replica.buckets]
        lanes = {span.lane for span in comm.session.recorder.spans()[started:]}
        found.append((sizes, used, lanes))
    return found


def test_traffic_equals_the_formula_and_the_line_has_a_lane_of_its_own():
    # Running mean and variance, and a counter, of 8 and of 6 features: float64, and int64.
    buffers = [8 * (8 + 8 + 6 + 6), 8 * (1 + 1)]
    for rank, found in enumerate(run(counted, world_size=3).values):
        for sizes, used, _ in found:
            costs = [ring_all_reduce_cost(size, 8, 3, rank) for size in sizes]
            costs += [broadcast_cost(num_bytes, 3, rank) for num_bytes in buffers]
            expected = sum(costs * 3, start=Cost(0, 0, 0))
            assert used == (expected.messages, expected.num_bytes)
        assert [len(sizes) > 1 for sizes, _, _ in found] == [False, True]
        # One bucket has nothing to run beside: whoever waits for it carries it out.
        assert [lanes for _, _, lanes in found] == [{0}, {0, 1}]


def outlives(comm):
    replica = BucketedDDP(comm, seeded(with_batch_norm))
    replica(some_batches((4,))[0][0]).sum().backward()
    reference = weakref.ref(replica)
    del replica
    gc.collect()
    return reference() is None


def test_a_replica_that_nobody_uses_is_freed():
    assert run(outlives, world_size=2).values == [True, True]


class Counting(Everything):
    """With a buffer that differs between ranks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs):
        self.seen += len(inputs)
        return super().forward(inputs)


# With 4 ranks, some have no sample of the third batch. Averages after 2 and 4 steps, and the end.
BATCHES, EVERY, AVERAGES = some_batches((7, 5, 2, 9, 8)), 2, (2, 4, 5)


def local_sgd(comm, **outer_step):
    """(state after each step, bytes sent in all steps)."""
    strategy, states = DDP(average_every=EVERY, **outer_step), []
    strategy.setup(comm, seeded(Counting), sgd)
    before = comm.bytes_sent
    for inputs, targets in BATCHES:
        mine = strategy.part_of(torch.arange(len(targets)))
        strategy.step(inputs[mine], targets[mine], len(targets))
        states.append(strategy.full_state())
    strategy.end_epoch()
    strategy.end_epoch()
    return [*states[:-1], strategy.full_state()], comm.bytes_sent - before


def one_after_the_other(world_size, outer_lr=1.0, outer_momentum=0.0):
    """The state after the last average, by plain PyTorch."""
    models = [seeded(Counting) for _ in range(world_size)]
    optimizers = [sgd([p for p in model.parameters() if p.requires_grad]) for model in models]
    started = [*seeded(Counting).parameters()]
    nesterov = {"momentum": outer_momentum, "nesterov": outer_momentum > 0}
    outer = torch.optim.SGD(started, lr=outer_lr, **nesterov)
    for number, (inputs, targets) in enumerate(BATCHES, start=1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            mine = share(torch.arange(len(targets)), rank, world_size)
            loss = functional.cross_entropy(model(inputs[mine]), targets[mine], reduction="sum")
            (loss * world_size / len(targets)).backward()
            optimizer.step()
        if number not in AVERAGES:
            continue
        for start, *same in zip(started, *(model.parameters() for model in models)):
            start.grad = start.detach() - torch.stack(same).mean(0).detach()
        outer.step()
        for start, *same in zip(started, *(model.parameters() for model in models)):
            for parameter in same:
                parameter.data = start.detach().clone()
    return models[0].state_dict()


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize(
    ("world_size", "outer_step"), [(1, {}), (3, {}), (4, {}), (1, DILOCO), (3, DILOCO)]
)
def test_local_sgd_averages_what_the_ranks_have_trained_alone(world_size, outer_step):
    values = run(partial(local_sgd, **outer_step), world_size=world_size).values
    # (The buffer is rank 0's.)
    due = one_after_the_other(world_size, **outer_step)
    assert largest_difference(values[0][0][-1], due) < 1e-10
    for number, same in enumerate(zip(*(found for found, _ in values)), start=1):
        assert len({*map(checksum, same)}) == (1 if number in AVERAGES else world_size), number
    trained = sum(p.numel() for p in Counting().parameters() if p.requires_grad)
    for rank, (_, num_bytes) in enumerate(values):
        average = ring_all_reduce_cost(trained, 8, world_size, rank)
        average += broadcast_cost(8, world_size, rank)
        assert num_bytes == len(AVERAGES) * average.num_bytes


def test_an_outer_step_with_lr_1_and_no_momentum_keeps_the_bits_of_the_mean():
    outer_step = OuterStep(1.0, 0.0)
    parameters, *means = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    outer_step.begin(parameters)
    for mean in means:
        updated = mean.clone()
        outer_step.update(updated)
        assert torch.equal(updated, mean)


def test_local_sgd_refuses_what_it_has_no_gradients_for():
    for options in ({"sync_batch_norm": True}, {"bucket_mb": 1}, {"amp": "fp16"}):
        with pytest.raises(ValueError, match="average_every 4 does not go with "):
            DDP(average_every=4, **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"outer_lr": 0.7}, "give average_every"),
        ({"average_every": 4, "outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"average_every": 4, "outer_momentum": 1.0}, "outer_momentum must be .* below 1"),
    ],
)
def test_an_outer_step_needs_averages_and_forgets(options, why):
    with pytest.raises(ValueError, match=why):
        DDP(**options)
