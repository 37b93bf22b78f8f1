"""Predicted steps: what holds on a free link, and that no emulated step is quicker than they."""

import statistics

import pytest

from labkit import strategies
from labkit.costs.link import Link
from workbook.measure.predicted import (
    MICRO_BATCHES,
    TECHNIQUES,
    beside,
    measured_s,
    predicted_s,
)

FREE = Link(0.0, 0.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_a_free_link_the_work_is_divided(ranks):
    alone_s = predicted_s("single", 1, FREE)
    for name in ("data_parallel", "ddp", "ring_all_reduce", "sharded", "tensor_parallel"):
        assert predicted_s(name, ranks, FREE) == pytest.approx(alone_s / ranks), name
    assert predicted_s("mesh", ranks, FREE) == pytest.approx(alone_s / ranks)
    assert predicted_s("model_parallel", ranks, FREE) == pytest.approx(alone_s)
    server_s = predicted_s("parameter_server", ranks, FREE)
    assert server_s == pytest.approx(alone_s / max(1, ranks - 1))
    if ranks != 3:  # four blocks make equal stages
        slots = (MICRO_BATCHES + ranks - 1) / MICRO_BATCHES / ranks
        assert predicted_s("pipeline", ranks, FREE) == pytest.approx(alone_s * slots)


@pytest.mark.more
def test_an_emulated_step_takes_at_least_what_the_model_says():
    names = ("single", "async_parameter_server", "model_parallel", "tensor_parallel", "sharded")
    steps = measured_s(2, names, repeats=1)
    for name in names:
        assert statistics.median(steps[name]) >= 0.98 * predicted_s(name, 2), name
    table = str(beside(steps, 2, Link(1e-3, 1e-7), 0.0))
    assert all(name in table for name in names)
    assert "emulated devices" in table


def test_every_technique_has_a_prediction_but_that_which_needs_experts():
    assert all(predicted_s(name, 4) > 0 for name in TECHNIQUES)
    assert {*strategies.STRATEGIES} - {*TECHNIQUES} == {"expert_parallel"}
