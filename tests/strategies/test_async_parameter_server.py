"""The asynchronous parameter server: staleness, bounds, traffic, and workers that die."""

import itertools
import math
import os
import signal
import time
from functools import partial

import pytest
import torch
from fifo_transport import over_streams  # noqa: F401  (a fixture)
from odd_models import Everything, seeded, sgd, some_batches
from ranks import running_ranks, travel_by_value, wait_until
from torch import nn

from labkit import WorkerError, run, strategies, train_with
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.training.state import largest_difference

travel_by_value(__name__)

# 107 = 3 x 35 + 2: four batches, the last of fewer samples than three workers.
SMALL = {"train_size": 107, "batch_size": 35, "lr": 0.02, "model": "mlp"}


def train_small(**settings):
    return train_with("async_parameter_server", **(SMALL | settings))


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_bound_is_kept_and_every_share_is_worked_through(world_size):
    workers = world_size - 1
    result = train_small(world_size=world_size, epochs=3, straggler="1:3", max_staleness=workers)
    staleness = result.notes["staleness"]
    assert max(late for _, late in staleness) <= workers
    # The batch of 2 has no sample for a third worker: then a share makes no update.
    shares = 3 * 4 * workers
    assert shares - 3 * 4 * (world_size == 4) <= len(staleness) <= shares
    assert result.notes["updates_by_rank"] == [
        sum(worker == rank for worker, _ in staleness) for rank in range(world_size)
    ]
    assert result.notes["lost_ranks"] == {}
    assert result.replicas_agree
    assert len(result.epochs) == 3
    assert result.as_dict()["staleness"] == staleness


@pytest.mark.usefixtures("over_streams")
def test_over_a_stream_that_queues():
    test_a_bound_is_kept_and_every_share_is_worked_through(3)


def test_a_bound_of_workers_minus_one_is_one_update_a_worker_and_round():
    result = train_small(world_size=3, epochs=2, straggler="2:4", max_staleness=1)
    # Pushes come in rounds: two by two, each pair holds both workers.
    workers = [worker for worker, _ in result.notes["staleness"]]
    assert [set(pair) for pair in zip(workers[::2], workers[1::2])] == [{1, 2}] * 8
    assert result.notes["updates_by_rank"] == [0, 8, 8]


def test_messages_and_bytes_are_those_of_the_formula():
    result = train_small(world_size=3, epochs=2, train_size=105)
    num_elements = sum(tensor.numel() for tensor in result.state.values())
    pushes = 2 * 3 * 2 + 1  # epochs, batches, workers, and the one under way at the end
    # With the parameters the server sends one number.
    assert result.messages[0] == 2 * pushes
    assert result.bytes_sent[0] == pushes * (num_elements + 1) * 4
    assert sum(result.messages[1:]) == 2 * pushes
    # With a gradient the workers send three numbers.
    assert sum(result.bytes_sent[1:]) == pushes * (num_elements + 3) * 4


class Odd(Everything):
    """And BatchNorm with its counter."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs):
        return self.norm(super().forward(inputs))


def train_odd(comm, batches, make_optimizer, max_staleness=4, batch_factor=2):
    """(state before, state at each end of an epoch, state after) of two epochs."""
    strategy = AsyncParameterServer(max_staleness=max_staleness)
    strategy.setup(comm, seeded(Odd), make_optimizer)
    before = strategy.full_state()
    endless = itertools.cycle([(x, y, batch_factor * len(y)) for x, y in batches])
    ends = [strategy.full_state() for _ in strategy.train(endless, len(batches), 2)]
    return before, ends, strategy.full_state()


def test_odd_parameters_and_buffers():
    values = run(train_odd, some_batches((5, 5, 5)), sgd, world_size=3).values
    before, ends, after = values[0]
    assert len(ends) == 2
    assert largest_difference(ends[1], after) == 0
    for _, _, state in values:
        assert largest_difference(state, after) == 0
    assert torch.equal(after["first.weight"], after["second.weight"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
    for still in ("frozen", "unused.weight", "unused.bias"):
        assert torch.equal(after[still], before[still])
    # Buffers follow one worker at a time: at most one count a share that was worked through.
    assert 1 <= after["norm.num_batches_tracked"] <= 12
    assert after["norm.running_var"].min() > 0


def losses_of_guessing(comm):
    """By epoch; the workers' shares are of 0 to 3 samples, and the model stays at zero."""
    strategy, model = AsyncParameterServer(), nn.Linear(6, 6)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    strategy.setup(comm, model, partial(torch.optim.SGD, lr=1e-12))
    sizes = itertools.cycle((comm.rank, 0, 3))
    batches = ((torch.ones(n, 6), torch.zeros(n, dtype=torch.int64), 6) for n in sizes)
    return [loss.item() for _, loss in strategy.train(batches, 4, 3)]


def test_an_epochs_loss_is_the_mean_of_its_samples_whoever_brought_them():
    losses = run(losses_of_guessing, world_size=3).values[0]
    assert losses == pytest.approx([math.log(6)] * 3)


class Dies(AsyncParameterServer):
    """Some ranks end before their third push."""

    dying = (2,)
    how = "killed"

    def work(self, batches):
        super().work(self.some(batches) if self.comm.rank in self.dying else batches)

    def some(self, batches):
        yield from itertools.islice(batches, 2)
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "killed while the server waits for it to push":
            self.comm.send(self.report, 0)
            time.sleep(0.2)
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
    assert counts[2] <= 2
    assert counts[1] > 2
    assert counts[3] > 2
    assert len(result.epochs) == 2
    assert result.messages[2] == 0
    assert len(result.checksums) == 3
    assert result.replicas_agree
    assert wait_until(lambda: not running_ranks(), 2)


def test_the_death_of_the_last_worker_is_an_error(monkeypatch):
    monkeypatch.setattr(strategies, "get", lambda *_, **__: Dies)
    monkeypatch.setattr(Dies, "dying", (1, 2))
    with pytest.raises(WorkerError, match="no worker is left after 4 updates: rank") as caught:
        train_small(world_size=3, epochs=2)
    assert caught.value.rank == 0
