"""Training on real ranks: every synchronous technique ends where one device ends."""

import pytest
import torch
from ranks import travel_by_value
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run, strategies, train_with
from labkit.costs import ring_all_reduce_cost
from labkit.experiment import check
from labkit.train import checksum, largest_difference
from labkit.workload import share

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
# 1,437 samples leave a last batch of 37 (batch 50) and of 2 (batch 35), fewer than three ranks.
SMALL = {"epochs": 1, "train_size": 177, "lr": 0.02}


@pytest.fixture(scope="module")
def one_device():
    cache = {}

    def trained(**settings):
        key = tuple(sorted(settings.items()))
        if key not in cache:
            cache[key] = train_with("single", **settings)
        return cache[key]

    return trained


# float64 finds mistakes at every world size; float32 only has to show that it stays close.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "world_size"),
    [*(("float64", 1e-10, ranks) for ranks in (1, 2, 3, 4)), ("float32", 1e-5, 3)],
)
@pytest.mark.parametrize(("strategy", "builtin"), PARALLEL)
def test_equals_one_device_for_any_number_of_ranks(
    one_device, strategy, builtin, world_size, dtype, tolerance
):
    # 177 = 5 x 35 + 2: batches that do not divide, and a last one of fewer samples than ranks.
    settings = SMALL | {"dtype": dtype, "batch_size": 35}
    result = train_with(strategy, world_size=world_size, builtin=builtin, **settings)
    alone = one_device(**settings)
    assert result.difference_from(alone) < tolerance
    assert result.replicas_agree
    assert result.test_accuracy == alone.test_accuracy
    assert result.epochs[0]["loss"] == pytest.approx(alone.epochs[0]["loss"], rel=1e-5)


def test_bytes_and_messages_of_a_run_equal_the_formula():
    result = train_with("ring_all_reduce", world_size=3, batch_size=35, **SMALL)
    parameters = sum(tensor.numel() for tensor in result.state.values())
    costs = [ring_all_reduce_cost(parameters, 4, 3, rank) for rank in range(3)]
    steps = 6
    assert result.bytes_sent == [steps * cost.num_bytes for cost in costs]
    assert result.messages == [steps * cost.messages for cost in costs]


def test_phases_add_up_to_the_time_of_a_rank():
    result = train_with("ring_all_reduce", world_size=2, **SMALL)
    kinds = {"data", "compute", "update", "share_reduce", "share_only"}
    assert kinds <= result.phases_s.keys() <= kinds | {"wait", "evaluate"}
    spent_s = sum(result.phases_s.values()) - result.phases_s.get("evaluate", 0)
    assert spent_s <= 1.2 * sum(epoch["seconds"] for epoch in result.epochs) + 0.1


@pytest.mark.parametrize("strategy", ["single", "ring_all_reduce"])
def test_digits_are_learnt(strategy):
    world_size = 1 if strategy == "single" else 2
    result = train_with(strategy, world_size=world_size, epochs=8)
    assert result.test_accuracy >= 0.95
    losses = [epoch["loss"] for epoch in result.epochs]
    assert losses[-1] < losses[0] / 5


def test_a_seed_decides_everything():
    first, again, other = (train_with("single", seed=seed, **SMALL) for seed in (1, 1, 2))
    assert first.difference_from(again) == 0
    assert first.checksums == again.checksums
    assert first.difference_from(other) > 0.01


# Models that a course meets sooner or later, trained by hand through the strategy protocol.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs)))


def frozen():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    model[0].weight.requires_grad_(False)
    return model


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs):
        return self.used(inputs)


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))


def with_batch_norm_over_pixels():
    """One sample a share is enough for it: it has 2 x 3 pixels."""
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(6, 6)]
    return nn.Sequential(*layers)


def train_by_hand(comm, make_strategy, make_model, batches, end_epoch=True):
    torch.manual_seed(0)
    model = make_model().double()
    strategy = make_strategy()
    strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for inputs, targets in batches:
        mine = share(torch.arange(len(targets)), *strategy.share())
        strategy.step(inputs[mine], targets[mine], len(targets))
    if end_epoch:
        strategy.end_epoch()
    return strategy.full_state()


def some_batches(sizes=(7, 5, 2)):
    torch.manual_seed(1)
    return [(torch.randn(n, 6).double(), torch.randint(6, (n,))) for n in sizes]


class Mixed(nn.Module):
    """Two dtypes."""

    def __init__(self):
        super().__init__()
        self.single, self.wide = nn.Linear(6, 6), nn.Linear(6, 6).double()

    def double(self):
        return self

    def forward(self, inputs):
        return self.wide(self.single(inputs.float()).double())


def test_parameters_of_two_dtypes_keep_them():
    ring, one = strategies.get("ring_all_reduce"), strategies.get("single")
    (alone,) = run(train_by_hand, one, Mixed, some_batches(), world_size=1).values
    states = run(train_by_hand, ring, Mixed, some_batches(), world_size=2).values
    assert checksum(states[0]) == checksum(states[1])
    assert largest_difference(states[0], alone) < 1e-5
    assert states[0]["single.weight"].dtype == torch.float32


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("make_model", [Tied, frozen, Unused])
def test_tied_frozen_and_unused_parameters(make_model, world_size):
    ring = strategies.get("ring_all_reduce")
    alone = run(
        train_by_hand, strategies.get("single"), make_model, some_batches(), world_size=1
    ).values[0]
    states = run(train_by_hand, ring, make_model, some_batches(), world_size=world_size).values
    assert len({checksum(state) for state in states}) == 1
    assert largest_difference(states[0], alone) < 1e-10


def test_batch_norm_normalises_by_share_and_averages_its_statistics():
    """A step uses the share's own statistics; an epoch's end averages the running ones."""
    inputs, targets = some_batches((8,))[0]
    ring = strategies.get("ring_all_reduce")
    states = run(train_by_hand, ring, with_batch_norm, [(inputs, targets)], world_size=2).values
    assert checksum(states[0]) == checksum(states[1])

    torch.manual_seed(0)
    model = with_batch_norm().double().train()
    halves = [model[0](half) for half in inputs.split(4)]
    means = [0.1 * half.mean(dim=0) for half in halves]
    torch.testing.assert_close(states[0]["1.running_mean"], (means[0] + means[1]) / 2)
    for half, target in zip(inputs.split(4), targets.split(4)):
        functional.cross_entropy(model(half), target, reduction="sum").div(8).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(states[0]["2.weight"], model[2].weight.detach())


def test_pytorchs_replicas_agree_on_the_running_averages_of_rank_0():
    ddp = strategies.get("ddp", builtin=True)
    args = with_batch_norm, some_batches((8,))
    apart = run(train_by_hand, ddp, *args, False, world_size=2).values
    states = run(train_by_hand, ddp, *args, world_size=2).values
    assert checksum(apart[0]) == checksum(states[0]) == checksum(states[1])
    assert checksum(apart[1]) != checksum(states[1])


def test_replicas_agree_though_a_rank_sat_a_batch_out():
    """The last batch has two samples for three ranks: BatchNorm's counter then differs."""
    ring = strategies.get("ring_all_reduce")
    batches = some_batches((6, 4, 2))
    model = with_batch_norm_over_pixels
    states = run(train_by_hand, ring, model, batches, world_size=3).values
    assert len({checksum(state) for state in states}) == 1
    assert states[2]["1.num_batches_tracked"] == len(batches)


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

    assert run(steps, strategies.get("ring_all_reduce"), world_size=2).values == [True, True]


@pytest.mark.parametrize("model", ["mobilenet", "resnet18"])
def test_replicas_of_real_models_agree(model):
    result = train_with(
        "ring_all_reduce",
        world_size=2,
        model=model,
        batch_size=8,
        epochs=1,
        train_size=16,
        lr=0.01,
    )
    assert result.replicas_agree


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "magic"}, "unknown strategy 'magic': choose one of single, "),
        ({"model": "gpt"}, "unknown model 'gpt': choose one of small_cnn"),
        ({"dataset": "imagenet"}, "unknown data set 'imagenet': choose one of digits, cifar10"),
        ({"strategy": "single", "world_size": 2}, "single trains on one rank, got world_size 2"),
        ({"device": "tpu"}, "device 'tpu' is not known"),
    ],
)
def test_what_cannot_run_is_refused_before_a_process_starts(settings, message):
    with pytest.raises(ValueError, match=message):
        check(RunConfig(**settings))


def test_states_of_different_models_are_not_compared():
    with pytest.raises(ValueError, match="differ in tensors"):
        largest_difference({"a": torch.ones(1)}, {"b": torch.ones(1)})
