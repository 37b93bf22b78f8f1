"""The learner's own model, data, loss and optimizer: on all ranks as on one, or refused."""

import json
import math
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

from labkit import train_with
from labkit.training.result import largest_difference

INPUTS, TARGETS = torch.randn(30, 6), torch.arange(30) % 3


class Net(nn.Module):
    """A chain with a skip connection, and a layer that nothing uses: [n, 6] -> [n, 3]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.unused, self.last = nn.Linear(2, 2), nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        hidden = hidden + torch.tanh(self.second(hidden))
        return self.last(hidden)


class Points(Dataset):
    """The samples that ``item`` makes of points [6] and their classes; a lock does not travel."""

    def __init__(self, item=lambda x, y, i: (x, y), lock=None):
        self.item, self.lock = item, lock

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.item(INPUTS[index], int(TARGETS[index]), index)


def net(inputs=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def test_the_caller_s_model_is_the_start_and_is_not_changed(tmp_path):
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts = {"model": model, "dataset": (INPUTS, TARGETS), "lr": 1e-30}
    result = train_with("ddp", world_size=2, **parts)
    assert largest_difference(result.state, before) < 1e-6
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.load_state_dict(result.state)
    assert math.isnan(result.test_accuracy)
    result.save_json(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    named = {name: written["config"][name] for name in ("model", "dataset", "loss", "optimizer")}
    assert list(named.values()) == ["Net (own)", "tuple (own)", "cross_entropy", "sgd"]
    assert written["epochs"][0]["test_accuracy"] is None


def random_net():
    """Not the same on all ranks."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    return Net()


def test_ranks_start_equal_even_if_their_models_do_not():
    parts = {"model": random_net, "dataset": Points}
    assert train_with("ring_all_reduce", world_size=2, **parts).replicas_agree


def test_what_has_no_classes_reports_its_loss():
    values = INPUTS.sum(dim=1, keepdim=True)
    parts = {"dataset": ((INPUTS, values), (INPUTS, values)), "loss": "mse_loss"}
    result = train_with("single", model=net(outputs=1), optimizer="adam", epochs=3, **parts)
    assert math.isnan(result.test_accuracy)
    assert result.epochs[-1]["test_loss"] < result.epochs[0]["test_loss"]
    assert result.config.lr == 1e-3


class TwoHeads(nn.Linear):
    def forward(self, inputs):
        logits = super().forward(inputs)
        return (logits, logits) if self.training else logits


LOADER = DataLoader(TensorDataset(INPUTS, TARGETS))
WEIGHTS = torch.tensor([1.0, 5.0, 0.1])
PENALIZED = net()


def with_penalty(outputs, targets):
    return cross_entropy(outputs, targets) + PENALIZED[0].weight.square().sum()


def by_confidence(outputs, targets):
    """A weighted mean whose weights depend on the parameters."""
    weights = outputs.softmax(1).amax(1)
    losses = cross_entropy(outputs, targets, reduction="none")
    return (losses * weights).sum(), weights.sum()


def clamped(outputs, targets):
    return mse_loss(outputs.clamp_(-1, 1), targets.float().view(-1, 1).expand_as(outputs))


class Mean(nn.Module):
    """A model whose outputs are a view of its parameter."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.linspace(0, 1, 3))

    def forward(self, inputs):
        return self.mean.expand(len(inputs), 3)


@pytest.mark.parametrize(
    "parts",
    [{"model": net(), "loss": clamped}, {"model": Mean(), "loss": "cross_entropy"}],
    ids=["loss in place", "outputs are a parameter"],
)
def test_what_pytorch_trains_is_not_refused(parts):
    settings = {"dataset": (INPUTS, TARGETS), "batch_size": 7, **parts}
    alone = train_with("single", **settings).state
    together = train_with("ddp", world_size=2, **settings).state
    assert largest_difference(together, alone) < 1e-5


REFUSED = {
    "of type DataLoader.* such as a DataLoader's dataset": {"dataset": LOADER},
    "uses args.*Own.* cannot be pickled .*Create": {"dataset": Points(lock=threading.Lock())},
    r"do not take torch.float32 inputs \[4, 6\] and": {"model": net(inputs=5)},
    "return the pair": {"loss": lambda x, y: cross_entropy(x, y, reduction="sum")},
    "depends on parameters, not only on outputs": {"model": PENALIZED, "loss": with_penalty},
    "weight that loss by_confidence .* depends on the outputs": {"loss": by_confidence},
    "no gradient with respect": {"loss": lambda x, y: cross_entropy(x.detach(), y)},
    "so that shares add up": {"loss": lambda x, y: cross_entropy(x, y, weight=WEIGHTS)},
    "takes no lr and no weight_decay here: leave them": {"optimizer": torch.optim.Adam, "lr": 0.1},
    "classes from 0 to 5, and the model tells 3": {"dataset": (INPUTS, torch.arange(30) % 6)},
    "classes from -1 to 2": {"dataset": (INPUTS, torch.arange(30) % 4 - 1)},
    "all 30 targets of dataset are -100": {"dataset": (INPUTS, torch.full((30,), -100))},
    "in training mode the model returns a tuple": {"model": TwoHeads(6, 3)},
    "1 of 25 samples .* more than 1 value": {
        "model": nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
        "dataset": (INPUTS[:25], TARGETS[:25]),
        "batch_size": 8,
    },
    "equally many samples": {"dataset": (INPUTS, TARGETS[:28])},
    "holds object": {"dataset": (np.array([None] * 8), np.zeros(8))},
    "one shape": {"dataset": [(torch.randn(6 - i % 2), 0) for i in range(8)]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_trained_is_refused_before_any_rank_starts(message):
    parts = {"model": net(), "dataset": (INPUTS, TARGETS)} | REFUSED[message]
    with pytest.raises(ValueError, match=message):
        train_with("ddp", world_size=2, **parts)


class InTwoStages(nn.Module):
    """A loss whose second stage begins after so many calls."""

    def __init__(self, calls):
        super().__init__()
        self.left = calls

    def forward(self, outputs, targets):
        self.left -= 1
        return cross_entropy(outputs, targets) * (1.0 if self.left >= 0 else 3.0)


def test_a_loss_that_counts_its_calls_counts_those_of_training_alone():
    data = torch.randn(80, 4), torch.randint(3, (80,))
    settings = {"model": nn.Sequential(nn.Linear(4, 3)), "dataset": data, "batch_size": 1}
    loss = InTwoStages(80)
    result = train_with("single", **settings, loss=loss, device="cpu")
    plain = train_with("single", **settings, device="cpu")
    assert largest_difference(result.state, plain.state) == 0.0
    assert loss.left == 80
    with pytest.raises(ValueError, match="counts its calls"):
        train_with("single", **settings, loss=InTwoStages(3), device="cpu")
