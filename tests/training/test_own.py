"""The learner's own model, data, loss and optimizer: on all ranks as on one, or refused."""

import json
import math
import os

import own_parts
import pytest
import torch
from own_parts import Bad, Net, Points, Stream, TwoOutputs, WithLock, adam, net
from ranks import travel_by_value
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from labkit import WorkerError, train_with
from labkit.training.result import largest_difference

travel_by_value(__name__)

INPUTS, TARGETS = torch.randn(30, 6), torch.arange(30) % 3


def test_the_caller_s_model_is_the_start_and_is_not_changed(tmp_path):
    model = own_parts.Net()
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
    parts = {"model": random_net, "dataset": lambda: Points(20)}
    assert train_with("ring_all_reduce", world_size=2, **parts).replicas_agree


def test_what_has_no_classes_reports_its_loss():
    values = INPUTS.sum(dim=1, keepdim=True)
    parts = {"dataset": ((INPUTS, values), (INPUTS, values)), "loss": "mse_loss"}
    result = train_with("single", model=net(outputs=1), optimizer="adam", epochs=3, **parts)
    assert math.isnan(result.test_accuracy)
    assert result.epochs[-1]["test_loss"] < result.epochs[0]["test_loss"]
    assert result.config.lr == 1e-3


def refuse(**parts):
    return {"model": net(), "dataset": (INPUTS, TARGETS)} | parts


REFUSED = {
    "dataset is of type Stream, .*give a map-style Dataset": refuse(dataset=Stream()),
    "of type DataLoader.* such as a DataLoader's dataset": refuse(
        dataset=DataLoader(TensorDataset(INPUTS, TARGETS))
    ),
    r"inputs \[30, 6\] and targets \[29\]: give one target": refuse(dataset=(INPUTS, TARGETS[1:])),
    r"do not fit in one batch .*\[6\] at entry 0": refuse(
        dataset=Bad(lambda x, y, i: (x[i % 2 :], y))
    ),
    "is a tuple, not a pair": refuse(dataset=Bad(lambda x, y, i: (x, y, i))),
    "uses args.*Own.* cannot be pickled .*Create it inside": refuse(dataset=WithLock()),
    r"do not take torch.float32 inputs \[4, 6\] and": refuse(model=net(inputs=5)),
    "tuple": refuse(model=TwoOutputs()),
    "nothing can be trained": refuse(model=net().requires_grad_(False)),
    "model Sequential cannot be copied": refuse(model=net().to("meta")),
    r"Linear\(\) raised .*Give a function without arguments": refuse(model=nn.Linear),
    "model is of type int: give an nn.Module": refuse(model=5),
    "Target 2 is out of bounds": refuse(model=net(outputs=2)),
    "the loss is not one number, the mean": refuse(loss=functional.mse_loss),
    "return the mean over samples": refuse(loss=nn.CrossEntropyLoss(reduction="sum")),
    "so that shares add up": refuse(
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]))
    ),
    "takes no lr and no weight_decay here: leave them": refuse(optimizer=adam, lr=0.1),
    "train_size is for labkit's data sets": refuse(train_size=31),
    "labkit's models take images": refuse(model="mlp"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_trained_is_refused_before_any_rank_starts(message):
    with pytest.raises(ValueError, match=message):
        train_with("ddp", world_size=2, **REFUSED[message])


def test_a_late_sample_of_another_shape_is_named_by_the_rank():
    late = Bad(lambda x, y, i: (x[i == 7 :], y))
    with pytest.raises(WorkerError, match=r"do not fit in one batch .*\[6\] at entry 0"):
        train_with("single", model=net(), dataset=late)
