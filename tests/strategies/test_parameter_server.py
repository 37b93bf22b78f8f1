"""The parameter server: equal to one device with any number of servers, counted to the byte."""

from functools import partial

import pytest
import torch
from fifo_transport import over_streams  # noqa: F401  (a fixture)
from odd_models import Everything, seeded, sgd, some_batches, with_batch_norm
from ranks import travel_by_value
from torch import nn

from labkit import run
from labkit.costs.traffic import parameter_server_cost
from labkit.strategies.parameter_server import ParameterServer, answer_one_by_one
from labkit.strategies.single import Single
from labkit.training.state import checksum, largest_difference
from labkit.workload.sampling import share

travel_by_value(__name__)


class OneNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return self.gain * inputs


def train_by_hand(comm, make_strategy, make_models, batches):
    """(state, number of samples, bytes and messages of the steps) by model."""
    found = []
    for make_model in make_models:
        strategy, samples, before = make_strategy(), 0, (comm.bytes_sent, comm.messages)
        strategy.setup(comm, seeded(make_model), sgd)
        for inputs, targets in batches:
            mine = share(torch.arange(len(targets)), *strategy.share())
            strategy.step(inputs[mine], targets[mine], len(targets))
            samples += len(mine)
        sent = comm.bytes_sent - before[0], comm.messages - before[1]
        strategy.end_epoch()
        found.append((strategy.full_state(), samples, sent))
    return found


def pull_from_the_naive_server(comm):
    values = torch.full((2,), 10.0)
    if comm.rank == 0:
        answer_one_by_one(comm, values, lr=0.5)
    else:
        comm.send(torch.tensor([1.0, 2.0]) * 10**comm.rank, 0)
        comm.recv(values, 0)
    return values.tolist(), comm.messages


def test_the_naive_server_answers_each_push_before_the_next():
    values, messages = zip(*run(pull_from_the_naive_server, world_size=3).values)
    assert values == ([-45.0, -100.0], [5.0, 0.0], [-45.0, -100.0])
    assert messages == (2, 1, 1)


@pytest.fixture(scope="module")
def alone():
    return run(
        train_by_hand, Single, (Everything, OneNumber), some_batches(), world_size=1
    ).values[0]


@pytest.mark.parametrize(("world_size", "servers"), [(4, 1), (4, 3), (5, 2)])
def test_any_number_of_servers_equals_one_device(alone, world_size, servers):
    models, batches = (Everything, OneNumber), some_batches()
    make = partial(ParameterServer, servers=servers, accumulate=2)
    ranks = run(train_by_hand, make, models, batches, world_size=world_size).values
    for number, trained in enumerate((6 * 6 + 6 * 2 + 2 + 1, 1)):
        states = [rank[number][0] for rank in ranks]
        assert len({checksum(state) for state in states}) == 1
        assert largest_difference(states[0], alone[number][0]) < 1e-10
        samples = [rank[number][1] for rank in ranks]
        assert samples[:servers] == [0] * servers
        assert sum(samples) == 14
        costs = [
            parameter_server_cost(trained, 8, world_size, rank, servers)
            for rank in range(world_size)
        ]
        steps = len(batches)
        assert [rank[number][2] for rank in ranks] == [
            (steps * cost.num_bytes, steps * cost.messages) for cost in costs
        ]


@pytest.mark.usefixtures("over_streams")
def test_over_a_stream_that_queues(alone):
    test_any_number_of_servers_equals_one_device(alone, 4, 2)


def test_batch_statistics_are_the_workers_own_and_their_running_ones_the_mean():
    inputs, targets = some_batches((8,))[0]
    make = partial(ParameterServer, servers=2)
    models = (with_batch_norm,)
    ranks = run(train_by_hand, make, models, [(inputs, targets)], world_size=4).values
    states = [rank[0][0] for rank in ranks]
    assert len({checksum(state) for state in states}) == 1
    first_layer = seeded(with_batch_norm)[0]
    means = [0.1 * first_layer(half).mean(dim=0) for half in inputs.split(4)]
    torch.testing.assert_close(states[0]["1.running_mean"], sum(means).detach() / 2)
    assert states[0]["1.num_batches_tracked"] == 1
