"""Data parallelism in one process: replicas in threads end where one device ends."""

from collections import Counter

import pytest
import torch
from odd_models import Mixed, Tied, Unused, frozen, seeded, sgd, some_batches, with_batch_norm
from ranks import travel_by_value
from torch import nn
from torch.nn import functional

from labkit import WorkerError, run, strategies, train_with
from labkit.costs.traffic import data_parallel_cost
from labkit.strategies.data_parallel import DataParallel
from labkit.training.state import largest_difference

travel_by_value(__name__)


def set_up(comm, make_model, devices=None):
    strategy = DataParallel(devices) if devices else strategies.get("single")()
    strategy.setup(comm, seeded(make_model), sgd)
    return strategy


def trained(comm, make_model, batches, devices=None):
    strategy = set_up(comm, make_model, devices)
    losses = [strategy.step(inputs, targets, len(targets)) for inputs, targets in batches]
    return strategy.full_state(), sum(losses).item()


def on_one_rank(fn, *args):
    return run(fn, *args, world_size=1, device="cpu").values[0]


def test_tied_frozen_and_unused_parameters_and_fewer_samples_than_devices():
    def compared(comm):
        found = []
        for make_model in (Tied, frozen, Unused):
            alone = trained(comm, make_model, some_batches())
            for devices in (["cpu"], ["cpu"] * 2, ["cpu"] * 3):
                state, loss = trained(comm, make_model, some_batches(), devices)
                found.append(largest_difference(state, alone[0]))
                found.append(abs(loss - alone[1]) / alone[1])
        return max(found)

    assert on_one_rank(compared) < 1e-10


def test_parameters_of_two_dtypes_keep_them():
    def compared(comm):
        alone, _ = trained(comm, Mixed, some_batches((7, 2)))
        state, _ = trained(comm, Mixed, some_batches((7, 2)), ["cpu"] * 3)
        assert {k: v.dtype for k, v in state.items()} == {k: v.dtype for k, v in alone.items()}
        return largest_difference(state, alone)

    assert on_one_rank(compared) < 1e-6


def test_batch_norm_normalises_by_part_and_keeps_the_averages_of_device_0():
    ((inputs, targets),) = some_batches((8,))
    state, _ = on_one_rank(trained, with_batch_norm, [(inputs, targets)], ["cpu", "cpu"])

    model = seeded(with_batch_norm)
    first = model[0](inputs[:4])
    torch.testing.assert_close(state["1.running_mean"], 0.1 * first.mean(dim=0))
    assert state["1.num_batches_tracked"] == 1
    for half, target in zip(inputs.split(4), targets.split(4)):
        functional.cross_entropy(model(half), target, reduction="sum").div(8).backward()
    updated = model[2].weight - 0.1 * model[2].weight.grad
    torch.testing.assert_close(state["2.weight"], updated.detach())


class Picky(nn.Linear):
    def forward(self, inputs):
        if (inputs == 7).any():
            raise IndexError("seven is not for me")
        return super().forward(inputs)


@pytest.mark.parametrize("place", [0, 5])
def test_what_a_thread_raises_ends_the_run(place):
    inputs, targets = torch.zeros(6, 6).double(), torch.zeros(6, dtype=torch.int64)
    inputs[place] = 7
    with pytest.raises(WorkerError, match="seven is not for me"):
        on_one_rank(trained, lambda: Picky(6, 6), [(inputs, targets)], ["cpu"] * 3)


def test_the_bytes_moved_equal_the_formula():
    settings = {"epochs": 1, "train_size": 71, "batch_size": 35, "model": "mlp"}
    result = train_with("data_parallel", devices="cpu,cpu,cpu", **settings)
    assert result.config.world_size == 3
    assert result.bytes_sent is None
    parameters = 4 * sum(tensor.numel() for tensor in result.state.values())
    sizes = {"input_bytes": 4 * 64, "output_bytes": 4 * 10}
    sizes |= {"state_bytes": parameters, "gradient_bytes": parameters}
    steps = [data_parallel_cost(size, 3, **sizes) for size in (35, 35, 1)]
    assert steps[2] == dict.fromkeys(("scatter", "replicate", "gather", "reduce"), 0)
    assert result.notes["bytes_moved"] == sum(map(Counter, steps), Counter())
    assert result.notes["devices"] == ["cpu"] * 3


def test_the_builtin_says_that_it_does_not_replicate_on_a_cpu():
    result = train_with(
        "data_parallel", builtin=True, world_size=2, device="cpu", train_size=64, model="mlp"
    )
    assert result.notes["replicas"] == 1
    assert "called the module itself, without replicas" in result.as_dict()["note"]
