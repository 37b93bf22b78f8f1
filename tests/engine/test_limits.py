"""Options and settings: impossible values are refused before a rank starts."""

import dataclasses
import math

import pytest

from labkit import run, train_with
from labkit.engine.runtime import supervisor
from labkit.training.config import RunConfig, type_of
from workbook.measure import compare
from workbook.measure.bench import main as bench


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(supervisor.Supervisor, "run", started)
    monkeypatch.setattr("labkit.engine.runtime.preload.warm_up", lambda **_: None)


WRONG = [True, "4", [], math.nan, -1, 10**30]


@pytest.mark.parametrize("setting", dataclasses.fields(RunConfig), ids=lambda one: one.name)
def test_no_setting_takes_a_value_that_cannot_be(setting):
    bad = {bool: ["", 3, []], str: [["x"] * 0, b"x", 3.5]}.get(type_of(setting), WRONG)
    for value in bad:
        with pytest.raises(ValueError, match=r"\w"):
            RunConfig(**{"strategy": "single", setting.name: value})


@pytest.mark.parametrize(
    ("function", "arguments", "names"),
    [
        (run, {"world_size": 1}, ("world_size", "timeout_s")),
        (train_with, {"strategy": "single"}, ("timeout_s",)),
        (compare.compare, {}, ("repeats", "epochs", "target", "world_size", "batch_size")),
        (bench, {}, ("repeats",)),
    ],
)
def test_no_function_takes_a_number_that_cannot_be(function, arguments, names):
    first = [lambda comm: None] if function is run else []
    for name in names:
        for value in [*WRONG, 0]:
            with pytest.raises(ValueError, match=r"\w"):
                function(*first, **arguments | {name: value})
