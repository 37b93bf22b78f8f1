"""DDP from scratch: as PyTorch's, also under no_sync; its traffic, and what overlaps with what."""

from functools import partial

from odd_models import seeded, sgd, some_batches
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from labkit import run
from labkit.costs.traffic import Cost, broadcast_cost, ring_all_reduce_cost
from labkit.strategies.ddp import BucketedDDP, NaiveDDP
from labkit.training.result import largest_difference

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
    # Running mean and variance, and a counter, of 8 and of 6 features.
    buffers = [8 * n for n in (8, 8, 1, 6, 6, 1)]
    for rank, found in enumerate(run(counted, world_size=3).values):
        for sizes, used, _ in found:
            costs = [ring_all_reduce_cost(size, 8, 3, rank) for size in sizes]
            costs += [broadcast_cost(num_bytes, 1, 3, rank) for num_bytes in buffers]
            expected = sum(costs * 3, start=Cost(0, 0, 0))
            assert used == (expected.messages, expected.num_bytes)
        assert [len(sizes) > 1 for sizes, _, _ in found] == [False, True]
        # One bucket has nothing to run beside: whoever waits for it carries it out.
        assert [lanes for _, _, lanes in found] == [{0}, {0, 1}]
