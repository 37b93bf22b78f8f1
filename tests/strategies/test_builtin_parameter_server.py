"""Parameter servers on PyTorch's RPC: the same contract, and an end in every case."""

import itertools
import os
import signal
import threading

import pytest
import torch
from odd_models import Everything, seeded, some_batches, train_by_hand, with_batch_norm
from ranks import travel_by_value
from torch import nn

from labkit import WorkerError, run, train_with
from labkit.strategies.builtin.rpc import RpcAsyncParameterServer, RpcParameterServer
from labkit.strategies.single import Single
from labkit.training.state import checksum, largest_difference

pytestmark = pytest.mark.slow

travel_by_value(__name__)


def twice(comm):
    """RPC begins and ends more than once in one process."""
    states = train_by_hand(comm, RpcParameterServer, Everything, some_batches((7, 5, 1)))
    return states, train_by_hand(comm, RpcParameterServer, with_batch_norm, some_batches((6,)))


def test_odd_parameters_and_batch_statistics():
    ranks = run(twice, world_size=4).values
    batches = some_batches((7, 5, 1))
    alone = run(train_by_hand, Single, Everything, batches, world_size=1).values[0]
    for index in range(2):
        assert len({checksum(rank[index]) for rank in ranks}) == 1
    assert largest_difference(ranks[0][0], alone) < 1e-10
    outputs = seeded(with_batch_norm)[0](some_batches((6,))[0][0])
    means = [0.1 * part.mean(dim=0).detach() for part in outputs.split(2)]
    torch.testing.assert_close(ranks[0][1]["1.running_mean"], sum(means) / 3)


def lose_a_rank(comm, technique, lost):
    strategy = technique()
    strategy.setup(comm, nn.Linear(6, 6), lambda p: torch.optim.SGD(p, lr=0.1))
    samples = int(comm.rank > 0)
    batch = torch.ones(samples, 6), torch.zeros(samples, dtype=torch.int64), 2

    def batches():
        yield from [batch] * 3
        if comm.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from itertools.repeat(batch)

    if technique is RpcAsyncParameterServer:
        if comm.rank == lost == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        list(strategy.train(batches(), steps=1000, epochs=1000))
    for batch in batches():
        strategy.step(*batch)


@pytest.mark.parametrize("technique", [RpcParameterServer, RpcAsyncParameterServer])
@pytest.mark.parametrize("lost", [0, 2], ids=["server", "worker"])
def test_a_rank_that_dies_ends_the_run(technique, lost):
    with pytest.raises(WorkerError, match=rf"rank {lost}\b(?s:.)*SIGKILL"):
        run(lose_a_rank, technique, lost, world_size=3)


def test_asynchronous_workers_go_at_their_own_pace_and_all_samples_count():
    settings = {"train_size": 200, "batch_size": 20, "epochs": 3, "dtype": "float64"}
    result = train_with(
        "async_parameter_server", world_size=4, builtin=True, straggler="3:40", **settings
    )
    shares = 10 * 3 * 3  # batches, workers, epochs
    assert len(result.notes["staleness"]) == sum(result.notes["updates_by_rank"]) == shares
    assert result.notes["updates_by_rank"][3] == min(result.notes["updates_by_rank"][1:])
    assert 1 <= max(late for _, late in result.notes["staleness"]) < shares
    assert result.replicas_agree
    assert result.epochs[-1]["loss"] < result.epochs[0]["loss"]
