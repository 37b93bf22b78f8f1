"""Mixed precision and clipping: to the bit where no sum differs; the messages that they take."""

import itertools
import math
from functools import partial

import pytest
import torch
from odd_models import sgd, some_batches
from one_device import ours_or_theirs
from torch import nn

from labkit import run, strategies
from labkit.costs.traffic import model_parallel_cost
from labkit.strategies.precision import LossScaler
from labkit.training.result import checksum, largest_difference

# It clips some of the batches.
CLIP_NORM = 0.75
CUTS = {1: (), 2: (3,), 3: (2, 5)}


def images():
    """Seven layers; under autocast some of them get 16 bits, and some 32."""
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)]
    layers += [nn.Hardtanh(), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 6)]
    return nn.Sequential(*layers)


def numbers():
    """Without BatchNorm, which normalizes shares."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def exact(world_size):
    """Techniques that equal one device to the bit, and its number of micro-batches."""
    cut = {"split_points": CUTS[world_size]}
    yield 1, ours_or_theirs("model_parallel", **cut)
    yield 2, ours_or_theirs("model_parallel", **cut, accumulate=2)
    yield 3, ours_or_theirs("pipeline", **cut, micro_batches=3, schedule="1f1b")
    if world_size < 3:
        # One worker.
        yield 2, ours_or_theirs("parameter_server", accumulate=2)
        yield 1, ours_or_theirs("parameter_server", True)
    if world_size == 2:
        yield 2, ours_or_theirs("async_parameter_server", accumulate=2)
        yield 1, ours_or_theirs("async_parameter_server", True)
    if world_size == 1:
        for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
            yield 1, ours_or_theirs(name, builtin)
        for stage, builtin in itertools.product((1, 2, 3), (False, True)):
            yield 1, ours_or_theirs("sharded", builtin, stage=stage)
        yield 1, ours_or_theirs("data_parallel", devices=("cpu",))
        stages = strategies.get("model_parallel", in_one_process=True)
        yield 2, partial(stages, split_points=(2, 5), devices=["cpu:0"] * 3, accumulate=2)


def close(world_size):
    """Techniques that add up what their ranks have rounded."""
    for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
        yield ours_or_theirs(name, builtin)
    for stage, builtin in itertools.product((1, 2, 3), (False, True)):
        yield ours_or_theirs("sharded", builtin, stage=stage)
    yield ours_or_theirs("parameter_server", servers=world_size - 1)
    cut = {"split_points": (1, 2)[: world_size - 1]}
    yield ours_or_theirs("pipeline", True, **cut)
    yield ours_or_theirs("pipeline", **cut)


def train(comm, make_strategy, model, amp, clip_norm=None):
    """(state, messages and bytes of the steps) after batches of 8, 4 and 2 samples."""
    torch.manual_seed(0)
    strategy = make_strategy(amp=amp)
    strategy.clip_norm = clip_norm
    strategy.setup(comm, model(), sgd)
    before = comm.messages, comm.bytes_sent
    shares = []
    for inputs, targets in some_batches((8, 4, 2)):
        mine = strategy.part_of(torch.arange(len(targets)))
        shares.append((inputs.float()[mine], targets[mine], len(targets)))
    if hasattr(strategy, "train"):
        list(strategy.train(iter([*shares, shares[0]]), len(shares), 1))
    else:
        for one in shares:
            strategy.step(*one)
    strategy.end_epoch()
    sent = comm.messages - before[0], comm.bytes_sent - before[1]
    state = strategy.full_state()
    strategy.close()
    return state, sent


def train_each(comm, cases):
    return [train(comm, *case) for case in cases]


@pytest.mark.parametrize(("world_size", "amp"), [(1, "bf16"), (2, "fp16"), (3, "bf16")])
def test_mixed_precision_equals_one_device(world_size, amp):
    """To the bit where one rank has all of a batch; sums of shares have been rounded before."""
    singles = [(partial(ours_or_theirs("single"), accumulate=n), images, amp) for n in (1, 2, 3)]
    singles += [(ours_or_theirs("single"), numbers, one) for one in (amp, None)]
    *alone, (near, _), (full, _) = run(train_each, singles, world_size=1, device="cpu").values[0]
    furthest = {"bf16": 2**-8, "fp16": 2**-11}[amp]
    assert 1e-5 < largest_difference(near, full) < 8 * furthest
    sums = list(close(world_size)) if world_size > 1 else []
    cases = [(make, images, amp) for _, make in exact(world_size)]
    cases += [(make, numbers, amp) for make in sums]
    values = run(train_each, cases, world_size=world_size, device="cpu").values
    for number, (parts, make) in enumerate(exact(world_size)):
        for rank in values:
            pair = rank[number][0], alone[parts - 1][0]
            assert largest_difference(*map(without_counters, pair)) == 0, make
    for make, states in zip(sums, list(zip(*values))[-len(sums) :]):
        assert len({checksum(state) for state, _ in states}) == 1, make
        assert largest_difference(states[0][0], near) < furthest, make


def without_counters(state):
    """Asynchronous workers count batches for themselves."""
    return {name: value for name, value in state.items() if "num_batches" not in name}


def test_what_crosses_a_cut_in_mixed_precision_has_two_bytes():
    """Before the convolution 6 numbers, after it 24."""
    make = ours_or_theirs("model_parallel", split_points=(1, 5))
    values = run(train_each, [(make, images, "bf16")], world_size=3, device="cpu").values
    for rank, ((_, sent),) in enumerate(values):
        # Nothing before the first cut is trained.
        steps = [model_parallel_cost([12, 48], n, rank, 3, first_trained=1) for n in (8, 4, 2)]
        assert sent == (sum(c.messages for c in steps), sum(c.num_bytes for c in steps))


def overflowing(comm, make_strategy, rank, layer):
    """The states and scales after each step; in the second, one gradient of one rank overflows."""
    torch.manual_seed(0)
    strategy, built, found = make_strategy(amp="fp16"), numbers(), []
    if comm.rank == rank:
        built[layer].weight.register_hook(lambda g: g * (math.inf if len(found) == 1 else 1))
    strategy.clip_norm = CLIP_NORM
    # Steps so small that the model hardly changes.
    strategy.setup(comm, built, lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9))
    strategy.precision.scaler.load_state_dict({"scale": 2.0**10, "_growth_tracker": 0})
    for inputs, targets in some_batches((6, 6, 6, 6)):
        mine = strategy.part_of(torch.arange(len(targets)))
        strategy.step(inputs.float()[mine], targets[mine], len(targets))
        found.append(
            (checksum(strategy.full_state()), *strategy.precision.scaler.state_dict().values())
        )
        # A server on RPC's threads would go on with the next step of the workers meanwhile.
        comm.barrier()
    strategy.close()
    return found


def overflow_each(comm, cases):
    return [overflowing(comm, *case) for case in cases]


def places_of_overflow(world_size):
    """A technique, and the rank and layer whose gradient overflows."""
    last = world_size - 1
    for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
        yield ours_or_theirs(name, builtin), last, 0
    # FSDP replaces the parameters, and loses the hook.
    for stage, builtin in ((1, False), (2, False), (3, False), (1, True)):
        yield ours_or_theirs("sharded", builtin, stage=stage), last, 0
    yield ours_or_theirs("parameter_server", True), last, 0
    # The first slice belongs to server 0, the last one to another.
    for layer in (0, 2):
        yield ours_or_theirs("parameter_server", servers=last), last, layer
    cut = {"split_points": (1, 2)[:last]}
    for rank, layer in ((0, 0), (last, 2)):
        yield ours_or_theirs("pipeline", **cut), rank, layer
        yield ours_or_theirs("pipeline", True, **cut), rank, layer


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_overflow_on_one_rank_skips_the_update_on_all_and_halves_all_scales(world_size):
    cases = list(places_of_overflow(world_size))
    values = run(overflow_each, cases, world_size=world_size, device="cpu").values
    for number, case in enumerate(cases):
        for ends in zip(*(rank[number] for rank in values)):
            assert len(set(ends)) == 1, case
        states, scales, good = zip(*values[0][number])
        assert scales == (1024, 512, 512, 512), case
        assert good == (1, 0, 1, 2), case
        assert states[0] == states[1] != states[2] != states[3], case


def test_the_scale_is_that_of_pytorch():
    ours, theirs = LossScaler(), torch.amp.GradScaler("cpu", growth_interval=3)
    ours.growth_interval = 3
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(weight.sum())
    for overflows in (1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0):
        weight.grad = torch.full((1,), math.nan if overflows else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(bool(overflows))
        assert ours.state_dict().items() <= theirs.state_dict().items()
    assert ours.scale == 2.0**16 / 2 / 2 * 4 / 4
