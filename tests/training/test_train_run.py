"""Training on real ranks: every synchronous technique ends where one device ends."""

from collections import defaultdict

import pytest
import torch
from odd_models import (
    fit_in_turn,
    in_turn,
    seeded,
    some_batches,
    train_by_hand,
    with_batch_norm,
    with_batch_norm_over_pixels,
)
from ranks import travel_by_value
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run, strategies, train_with
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.training.resolve import make_strategy
from labkit.training.result import checksum, largest_difference, tolerance
from labkit.workload.samples import share

travel_by_value(__name__)

PARALLEL = [
    pytest.param("data_parallel", False, id="data-parallel"),
    pytest.param("data_parallel", True, id="data-parallel-builtin"),
    pytest.param("ddp", False, id="ddp"),
    pytest.param("parameter_server", False, id="server"),
    pytest.param("parameter_server", True, id="server-builtin"),
    pytest.param("ring_all_reduce", False, id="ring"),
    pytest.param("ring_all_reduce", True, id="ring-builtin"),
]
# float64 finds mistakes at every world size; float32 only has to show that it stays close.
EXACT = [("float64", world_size) for world_size in (1, 2, 3, 4)]
CLOSE = ("float32", 3)
# 107 = 3 x 35 + 2: batches that do not divide, and a last one of fewer samples than ranks.
SMALL = {"epochs": 1, "train_size": 107, "lr": 0.02}


def model_of(world_size):
    """Convolutions take their time in float64: they are trained on three ranks."""
    return "small_cnn" if world_size == 3 else "mlp"


def job(strategy, builtin=False, **settings):
    config = RunConfig(strategy, builtin=builtin, **settings)
    return config, make_strategy(config)


@pytest.fixture(scope="module")
def trained():
    """The ranks' reports by technique, world size and dtype: one run for each number of ranks."""
    settings = SMALL | {"batch_size": 35}
    jobs = defaultdict(dict)
    for dtype, world_size in (*EXACT, CLOSE):
        like = settings | {"dtype": dtype, "model": model_of(world_size)}
        jobs[1]["single", like["model"], dtype] = job("single", **like)
        for strategy, builtin in (param.values for param in PARALLEL):
            one = job(strategy, builtin, world_size=world_size, **like)
            ranks = 1 if strategy == "data_parallel" else world_size
            jobs[ranks][strategy, builtin, world_size, dtype] = one
    found = {}
    for ranks, some in jobs.items():
        values = run(fit_in_turn, some, world_size=ranks).values
        found |= {name: [reports[name] for reports in values] for name in some}
    return found


@pytest.mark.parametrize(("dtype", "world_size"), [*EXACT, CLOSE])
@pytest.mark.parametrize(("strategy", "builtin"), PARALLEL)
def test_equals_one_device_for_any_number_of_ranks(trained, strategy, builtin, world_size, dtype):
    first, *others = trained[strategy, builtin, world_size, dtype]
    (alone,) = trained["single", model_of(world_size), dtype]
    assert largest_difference(first.state, alone.state) < tolerance(dtype, on_gpu=False)
    assert {report.checksum for report in others} <= {first.checksum}
    (epoch,), (due,) = first.epochs, alone.epochs
    for name in ("test_accuracy", "train_accuracy"):
        assert epoch[name] == due[name]
    assert epoch["test_loss"] == pytest.approx(due["test_loss"], rel=1e-5)
    assert epoch["loss"] == pytest.approx(due["loss"], rel=1e-5)


def test_named_devices_are_those_of_the_ranks():
    settings = SMALL | {"model": "mlp"}
    named = train_with("ring_all_reduce", devices=["cpu", "cpu"], **settings)
    assert (named.config.world_size, named.config.devices) == (2, "cpu,cpu")
    plain = train_with("ring_all_reduce", world_size=2, device="cpu", **settings)
    assert named.bytes_sent == plain.bytes_sent
    assert named.difference_from(plain) == 0.0


def test_bytes_and_messages_of_a_run_equal_the_formula():
    result = train_with("ring_all_reduce", world_size=3, batch_size=35, **SMALL)
    parameters = sum(tensor.numel() for tensor in result.state.values())
    costs = [ring_all_reduce_cost(parameters, 4, 3, rank) for rank in range(3)]
    steps = 4
    assert result.bytes_sent == [steps * cost.num_bytes for cost in costs]
    assert result.messages == [steps * cost.messages for cost in costs]
    assert result.replicas_agree
    alone = train_with("single", batch_size=35, **SMALL)
    assert result.difference_from(alone) < result.tolerance(alone)
    assert result.test_accuracy == alone.test_accuracy


def test_phases_add_up_to_the_time_of_a_rank():
    result = train_with("ring_all_reduce", world_size=2, **SMALL)
    kinds = {"data", "compute", "update", "share_reduce", "share_only"}
    assert kinds <= result.phases_s.keys() <= kinds | {"wait", "evaluate"}
    spent_s = sum(result.phases_s.values()) - result.phases_s.get("evaluate", 0)
    assert spent_s <= 1.2 * sum(epoch["seconds"] for epoch in result.epochs) + 0.1


# Models that a course meets sooner or later, trained by hand through the strategy protocol.

RING = strategies.get("ring_all_reduce")
# The last batch has two samples for three ranks: BatchNorm's counter then differs.
SAT_OUT = some_batches((6, 4, 2))


@pytest.fixture(scope="module")
def by_hand():
    """By number of ranks and name, what each rank ends with: one run for each number of ranks."""
    calls = {
        2: {"batch norm": (RING, with_batch_norm, some_batches((8,)))},
        3: {"sat out": (RING, with_batch_norm_over_pixels, SAT_OUT)},
    }
    found = {}
    for ranks, some in calls.items():
        values = run(in_turn, train_by_hand, some, world_size=ranks).values
        found |= {(ranks, name): [states[name] for states in values] for name in some}
    return found


def test_batch_norm_normalises_by_share_and_keeps_the_first_ranks_statistics(by_hand):
    """A step uses the share's own statistics; all ranks end with the first one's running ones."""
    states = by_hand[2, "batch norm"]
    assert checksum(states[0]) == checksum(states[1])

    ((inputs, targets),) = some_batches((8,))
    model = seeded(with_batch_norm)
    halves = [model[0](half) for half in inputs.split(4)]
    torch.testing.assert_close(states[0]["1.running_mean"], 0.1 * halves[0].mean(dim=0))
    for half, target in zip(inputs.split(4), targets.split(4)):
        functional.cross_entropy(model(half), target, reduction="sum").div(8).backward()
    updated = model[2].weight - 0.1 * model[2].weight.grad
    torch.testing.assert_close(states[0]["2.weight"], updated.detach())


def test_replicas_agree_though_a_rank_sat_a_batch_out(by_hand):
    states = by_hand[3, "sat out"]
    assert len({checksum(state) for state in states}) == 1
    assert states[2]["1.num_batches_tracked"] == len(SAT_OUT)


def test_a_nan_of_an_earlier_step_does_not_stay_in_an_empty_share():  # row 12
    def steps(comm, make_strategy):
        strategy = make_strategy()
        model = nn.Linear(1, 2)
        strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=0.0))
        for value in (float("nan"), 1.0):
            inputs, targets = torch.full((1, 1), value), torch.tensor([0])
            mine = share(torch.arange(1), *strategy.share())
            strategy.step(inputs[mine], targets[mine], 1)
            with torch.no_grad():
                finite = bool(torch.isfinite(model.weight.grad).all())
                model.weight.fill_(1.0)
                model.bias.zero_()
        return finite

    assert run(steps, RING, world_size=2).values == [True, True]
