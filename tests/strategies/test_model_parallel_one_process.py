"""Layers on several devices of one process. ``cpu:0`` is another name of the CPU: a device of its
own for everything but speed."""

import pytest
import torch
from odd_models import sgd
from ranks import travel_by_value
from torch import nn

from labkit import run, strategies
from labkit.strategies.model_parallel_one_process import ModelParallelOneProcess
from labkit.training.state import largest_difference
from labkit.training.train_run import train_with

travel_by_value(__name__)


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, 4)).double()


def train(comm, strategy, frozen=0):
    built = model()
    built[:frozen].requires_grad_(False)
    strategy.setup(comm, built, sgd)
    torch.manual_seed(1)
    for n in (7, 5, 5, 5):
        inputs, targets = torch.randn(n, 6).double(), torch.randint(4, (n,))
        strategy.step(inputs, targets, n)
    logits = strategy.predict(torch.ones(2, 6).double())
    return strategy.full_state(), logits, strategy.notes()


def both(comm, frozen):
    placed = ModelParallelOneProcess((2, 4), ("cpu", "cpu:0", "cpu:1"))
    return train(comm, placed, frozen), train(comm, strategies.get("single")(), frozen)


@pytest.mark.parametrize("frozen", [0, 4])
def test_equal_to_one_device_and_every_hop_is_told(frozen):
    (placed, single) = run(both, frozen, world_size=1).values[0]
    assert largest_difference(placed[0], single[0]) < 1e-10
    assert torch.equal(placed[1], single[1])
    notes = placed[2]
    assert notes["devices"] == ["cpu", "cpu:0", "cpu:1"]
    # The first step warms up; of the others three have 5 samples.
    found = {(hop["cut"], hop["direction"]): hop for hop in notes["hops"]}
    crossing = [(0, "forward"), (1, "forward")]
    # With layers 0 to 3 frozen nothing before either cut is trained.
    crossing += [] if frozen else [(0, "backward"), (1, "backward")]
    assert found.keys() == set(crossing)
    for (cut, _), hop in found.items():
        assert (hop["num_bytes"], hop["count"]) == (5 * (8, 5)[cut] * 8, 3)
        assert 0 < hop["quartiles_s"][0] <= hop["median_s"] <= hop["quartiles_s"][1]


def test_one_device_by_name_is_one_stage():
    settings = {"model": "mlp", "train_size": 64, "batch_size": 32}
    placed = train_with("model_parallel", devices="cpu", **settings)
    single = train_with("single", device="cpu", **settings)
    assert placed.difference_from(single) == 0
    assert placed.notes == {"split_points": [], "devices": ["cpu"], "hops": []}
    assert placed.bytes_sent is None
