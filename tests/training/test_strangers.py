"""What strangers bring: equal to one device, or refused in a sentence before training."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from labkit import WorkerError, train_with
from labkit.training.result import largest_difference

SMALL = {"batch_size": 8, "dtype": "float64", "device": "cpu", "timeout_s": 60}


def labeled(inputs):
    return inputs, torch.arange(len(inputs)) % 3


def make_data():
    return labeled(torch.randn(32, 8))


def unseeded():
    return labeled(torch.from_numpy(np.random.default_rng().standard_normal((32, 8))))


def tokens():
    return labeled(torch.randint(0, 20, (32, 4)))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=True)

    def forward(self, numbers):
        return self.embedding(numbers).mean(1)


def sparse():
    return nn.Sequential(Bag(), nn.Linear(6, 3))


def tied_sparse():
    model = nn.Sequential(Bag(), nn.Linear(6, 20, bias=False))
    model[1].weight = model[0].embedding.weight
    return model


class Positions(nn.Module):
    def forward(self, inputs):
        return inputs + torch.arange(inputs.shape[-1]) / 8


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), Positions(), nn.LazyLinear(3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def normed():
    return nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))


def with_statistics():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class KeepsStatistics(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def frozen_statistics():
    return KeepsStatistics(*with_statistics())


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


ON_TWO = {"world_size": 2}
PIPELINE = ("pipeline", ON_TWO)
COPIES = ("data_parallel", {"devices": "cpu,cpu"})
MESH = ("mesh", {"dp": 2})


@pytest.mark.fresh
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("model", "data", "techniques"),
    [
        (sparse, tokens, [("ddp", ON_TWO), ("ring_all_reduce", ON_TWO), COPIES, MESH]),
        (tied_sparse, tokens, [PIPELINE]),
        (lazy, make_data, [PIPELINE, ("ddp", ON_TWO)]),
        (normed, make_data, [PIPELINE, COPIES]),
        (frozen_statistics, make_data, [PIPELINE, ("model_parallel", ON_TWO)]),
    ],
)
def test_it_trains_as_on_one_device(model, data, techniques):
    settings = SMALL | {"model": model, "dataset": data, "optimizer": plain_sgd}
    one = train_with("single", **settings).state
    for strategy, options in techniques:
        found = train_with(strategy, **settings, **options).state
        assert largest_difference(found, one) < 1e-10, strategy


@pytest.mark.fresh
def test_local_averages_after_each_update_decay_sparse_weights_as_ddp_does():
    decayed = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    settings = SMALL | {"model": sparse, "dataset": tokens, "optimizer": decayed}
    ddp = train_with("ddp", **ON_TWO, **settings).state
    averaged = train_with("ddp", average_every=1, **ON_TWO, **settings).state
    assert largest_difference(averaged, ddp) < 1e-10


class NeverZero(nn.Linear):
    def forward(self, inputs):
        assert inputs.any(), "zeros"
        return super().forward(inputs)


def test_a_model_that_takes_no_empty_batch_or_no_zeros_is_refused():
    settings = SMALL | {"model": [NeverZero(8, 8), nn.Linear(8, 3)], "dataset": make_data}
    with pytest.raises(ValueError, match="has 0 of 10"):
        train_with("ddp", world_size=3, builtin=True, train_size=10, **settings)
    with pytest.raises(ValueError, match=r"(?s)sample of zeros.*Give split_points"):
        train_with("pipeline", **ON_TWO, **settings)


@pytest.mark.fresh
def test_ranks_with_different_data_are_refused():
    with pytest.raises(WorkerError, match=r"data set of rank . differs.*seed"):
        train_with("ddp", model=with_statistics, dataset=unseeded, **ON_TWO, **SMALL)
