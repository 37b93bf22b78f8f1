"""RunConfig refuses what cannot run, with the numbers."""

import dataclasses

import pytest

from labkit.config import RunConfig


def test_defaults_stand_and_are_frozen():
    config = RunConfig()
    assert config.as_dict()["strategy"] == "single"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 0}, "world_size must be a whole number from 1, got 0"),
        ({"epochs": -1}, "epochs must be"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"train_size": 0}, "train_size must be"),
        ({"world_size": 4, "batch_size": 3}, "batch_size 3 is smaller than world_size 4"),
        ({"lr": 0}, "lr must be above 0"),
        ({"momentum": 1}, "momentum must be"),
        ({"dtype": "int8"}, "unknown dtype 'int8': choose one of float32, float64"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)
