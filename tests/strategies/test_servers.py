"""Parameter servers: counted to the byte, staleness and bounds, batch statistics, lost workers."""

import itertools
import os
import signal
import time
from functools import partial

import pytest
import torch
from odd_models import Everything, Mixed, sgd, some_batches
from one_device import train_each
from ranks import running_ranks, wait_until

from labkit import WorkerError, run, strategies, train_with
from labkit.costs.traffic import parameter_server_cost
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.strategies.parameter_server import ParameterServer

# 107 = 3 x 35 + 2: four batches, the last of fewer samples than three workers.
SMALL = {"train_size": 107, "batch_size": 35, "lr": 0.02, "model": "mlp"}


def train_small(**settings):
    return train_with("async_parameter_server", **(SMALL | settings))


@pytest.mark.parametrize(("world_size", "servers"), [(4, 1), (4, 3), (5, 2)])
def test_bytes_and_messages_are_those_of_the_formula(world_size, servers):
    elements = 6 * 6 + 6 * 2 + 2 + 1
    case = partial(ParameterServer, servers=servers), Everything
    batches = some_batches((8, 5))
    found = run(train_each, batches, batches[0][0], [case], world_size=world_size).values
    for rank, (trained,) in enumerate(found):
        cost = parameter_server_cost(elements, 8, world_size, rank, servers)
        assert trained.sent == [(cost.messages, cost.num_bytes)] * 2
        assert (trained.counts[1] == 0) == (rank < servers)
    assert sum(trained.counts[1] for (trained,) in found) == 13


@pytest.mark.parametrize("name", ["parameter_server", "async_parameter_server"])
def test_parameters_of_two_dtypes_are_refused(name):
    """End to end they would all become float64."""

    def set_up(comm):
        strategies.get(name)().setup(comm, Mixed(), sgd)

    with pytest.raises(WorkerError, match="float32, float64 cannot lie end to end"):
        run(set_up, world_size=2)


@pytest.mark.parametrize(("world_size", "builtin"), [(4, False), (3, True)])
def test_a_bound_is_kept_and_every_share_is_worked_through(world_size, builtin):
    workers = world_size - 1
    settings = {"world_size": world_size, "builtin": builtin, "epochs": 3, "straggler": "1:3"}
    result = train_small(**settings, max_staleness=workers)
    staleness = result.notes["staleness"]
    assert max(late for _, late in staleness) <= workers
    # The batch of 2 has no sample for a third worker: then a share makes no update.
    shares = 3 * 4 * workers
    assert shares - 3 * 4 * (world_size == 4) <= len(staleness) <= shares
    counts = [sum(worker == rank for worker, _ in staleness) for rank in range(world_size)]
    assert result.notes["updates_by_rank"] == counts
    assert result.replicas_agree
    assert len(result.epochs) == 3
    assert result.epochs[-1]["loss"] < result.epochs[0]["loss"]


def test_messages_and_bytes_of_the_asynchronous_server():
    result = train_small(world_size=3, epochs=2, train_size=105)
    elements = sum(tensor.numel() for tensor in result.state.values())
    pushes = 2 * 3 * 2 + 1  # epochs, batches, workers, and the one under way at the end
    # With the parameters the server sends one number, with a gradient workers send two float64.
    assert (result.messages[0], sum(result.messages[1:])) == (2 * pushes, 2 * pushes)
    assert result.bytes_sent[0] == pushes * (elements + 1) * 4
    assert sum(result.bytes_sent[1:]) == pushes * (elements * 4 + 2 * 8)


class Dies(AsyncParameterServer):
    """Some ranks end before their third push."""

    dying = (2,)
    how = "killed"

    def work(self, batches):
        super().work(self.some(batches) if self.comm.rank in self.dying else batches)

    def some(self, batches):
        yield from itertools.islice(batches, 2)
        if self.how == "killed while the server waits for it to push":
            self.comm.send(torch.zeros(2, dtype=torch.float64), 0)
            time.sleep(0.2)
        if self.how:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("enough")


@pytest.mark.parametrize("how", ["killed", "killed while the server waits for it to push", ""])
def test_the_server_goes_on_without_a_worker_that_dies_and_says_so(monkeypatch, capsys, how):
    monkeypatch.setattr(strategies, "get", lambda *_, **__: Dies)
    monkeypatch.setattr(Dies, "how", how)
    result = train_small(world_size=4, epochs=2, max_staleness=4)
    why = "was killed by SIGKILL" if how else "raised ValueError: enough"
    assert result.notes["lost_ranks"].keys() == {2}
    assert why in result.notes["lost_ranks"][2]
    assert "rank 2 is lost after" in capsys.readouterr().out
    counts = result.notes["updates_by_rank"]
    assert counts[2] <= 2 < min(counts[1], counts[3])
    assert len(result.epochs) == 2
    assert result.messages[2] == 0
    assert result.replicas_agree
    assert wait_until(lambda: not running_ranks(), 60)
