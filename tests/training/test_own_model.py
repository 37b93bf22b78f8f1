"""Models whose values or hooks a copy, a conversion or a cut would lose are refused."""

import pytest
import torch
from torch import nn

from labkit import train_with
from labkit.training.result import largest_difference

DATA = torch.randn(12, 6), torch.arange(12) % 3


def plain():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, inputs):
        return torch.fft.irfft(torch.fft.rfft(inputs) * self.factor, n=6)


def complex_part():
    return nn.Sequential(Spectral(), nn.Linear(6, 3))


def tied_by_memory():
    model = plain()
    model[2].weight.data = model[0].weight.data
    return model


def overlapping():
    model, memory = plain(), torch.randn(50)
    model[0].weight.data = memory[:36].view(6, 6)
    model[3].weight.data = memory[32:].view(3, 6)
    return model


def side_by_side():
    """Views of one memory that do not overlap."""
    model, memory = plain(), torch.randn(54)
    model[0].weight.data = memory[:36].view(6, 6)
    model[3].weight.data = memory[36:].view(3, 6)
    return model


def tied():
    model = plain()
    model[2].weight = model[0].weight
    return model


def train(make, strategy="single", **options):
    given = {"model": make, "dataset": DATA, "batch_size": 5, "dtype": "float64"}
    return train_with(strategy, **given | options)


@pytest.mark.parametrize("given", ["a function", "a model"])
@pytest.mark.parametrize("make", [complex_part, tied_by_memory, overlapping])
def test_complex_numbers_and_parameters_tied_by_memory_are_refused(make, given):
    with pytest.raises(ValueError, match=r"complex64|share memory"):
        train(make if given == "a function" else make())


@pytest.mark.parametrize("make", [side_by_side, tied])
def test_one_parameter_in_two_places_and_memory_side_by_side_are_trained(make):
    one = train(make)
    assert largest_difference(train(make, "sharded", world_size=2).state, one.state) < 1e-10


def halved():
    model = plain()
    model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    return model


@pytest.mark.parametrize(
    ("make", "strategy", "options"),
    [
        (halved, "ddp", {"world_size": 2}),
        (halved, "single", {"accumulate": 2}),
        (halved, "data_parallel", {"devices": "cpu,cpu"}),
        (halved(), "single", {}),
    ],
)
def test_a_hook_that_would_be_lost_or_see_a_part_is_refused(make, strategy, options):
    with pytest.raises(ValueError, match=r"0.weight of the model has a hook"):
        train(make, strategy, **options)


def test_a_difference_in_an_imaginary_part_counts():
    state = {"factor": torch.tensor([1 + 1j])}
    assert largest_difference({"factor": torch.tensor([1 + 2j])}, state) > 0.5


class Idle(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.idle = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_that_no_sample_uses_is_named(used, capsys):
    train(plain if used else Idle, optimizer="adamw", weight_decay=0.1)
    assert ("idle first" in capsys.readouterr().err) != used


class Renormed(nn.EmbeddingBag):
    def forward(self, inputs):
        return super().forward(inputs.abs().long())


@pytest.mark.parametrize("strategy", ["ddp", "sharded", "parameter_server", "mesh"])
def test_a_parameter_that_forward_changes_is_refused_where_ranks_divide_a_batch(strategy):
    sides = {"dp": 2} if strategy == "mesh" else {"world_size": 2}
    with pytest.raises(ValueError, match=r"changes parameter 0\.weight in place"):
        train([Renormed(9, 3, max_norm=0.5), nn.Linear(3, 3)], strategy, **sides)


class Normalized(nn.Linear):
    def forward(self, inputs):
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight))
        return super().forward(inputs)


def test_a_parameter_that_forward_changes_alike_for_all_samples_is_trained():
    model = Normalized(6, 3)
    one = train(model)
    two = train(model, "ddp", world_size=2)
    assert largest_difference(one.state, two.state) < 1e-10


class Cached(nn.Linear):
    def forward(self, inputs):
        self.register_buffer("cache", None if self.training else inputs, persistent=False)
        return super().forward(inputs)


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("make", "options", "is_named"),
    [
        (spectral, {"accumulate": 2}, True),
        (spectral, {}, False),
        ([Cached(6, 3)], {"accumulate": 2}, False),
        ([nn.BatchNorm1d(6), *plain()], {"accumulate": 2, "batch_size": 6}, False),
    ],
)
def test_a_buffer_that_a_forward_changes_is_named(make, options, is_named, capsys):
    train(make, **options)
    assert ("(buffer parametrizations" in capsys.readouterr().err) == is_named
