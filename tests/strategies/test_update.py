"""Clipping, mixed precision and accumulation in every technique, against one device.

One device is written out here in plain PyTorch where that is possible, not taken from labkit.
"""

import itertools
import math
from functools import partial

import pytest
import torch
from odd_models import sgd, some_batches
from ranks import travel_by_value
from torch import nn

from labkit import run, strategies
from labkit.costs.traffic import (
    NOTHING,
    model_parallel_cost,
    naive_all_reduce_cost,
    parameter_server_cost,
)
from labkit.strategies.base import OwnPaceStrategy
from labkit.strategies.model_parallel_one_process import ModelParallelOneProcess
from labkit.strategies.update import LossScaler
from labkit.training.state import checksum, largest_difference
from labkit.workload.sampling import share

travel_by_value(__name__)

TORCH_DDP = strategies.get("ddp", builtin=True)
# Of models with seven layers, by number of stages.
COUNTED = [
    strategies.get(name)
    for name in ("parameter_server", "model_parallel", "pipeline", "ring_all_reduce", "ddp")
]
SPLITS = {1: (), 2: (3,), 3: (2, 5), 4: (1, 3, 5)}
# It clips some of the batches, see the test.
CLIP_NORM = 0.75
BATCHES = (7, 5, 1, 9)


class Spare(nn.Module):
    """A layer with a parameter that forward does not use: its gradient is missing."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 6), nn.Linear(2, 3)

    def forward(self, inputs):
        return self.used(inputs)


def odd():
    """Seven layers with tied and frozen parameters, and missing gradients."""
    first, frozen = nn.Linear(6, 6), nn.Linear(6, 6)
    tied = nn.Linear(6, 6)
    tied.weight = first.weight
    frozen.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), frozen, tied, nn.Tanh(), Spare(), nn.Linear(6, 6))


def untied():
    """Without the tied one, which one process cannot have on two devices."""
    model = odd()
    model[3] = nn.Linear(6, 6)
    return model


def all_used():
    """PyTorch's DDP refuses missing gradients, unless it is asked to search for them."""
    model = odd()
    model[5] = nn.Linear(6, 6)
    return model


def model_of(make):
    """The model that a technique trains here, in float64."""
    own = {ModelParallelOneProcess: untied, TORCH_DDP: all_used}
    made = own.get(make.func, odd)
    return partial(wide, made)


def wide(make_model):
    return make_model().double()


def technique(name, builtin=False, **options):
    return partial(strategies.get(name, builtin=builtin), **options)


def in_one_process(world_size):
    """Techniques whose devices are those of one process, which is one rank."""
    replicas, stages = ("cpu",) * world_size, tuple(f"cpu:{i}" for i in range(world_size))
    yield technique("data_parallel", devices=replicas)
    yield technique("data_parallel", devices=replicas, accumulate=3)
    yield technique("data_parallel", builtin=True, devices=replicas, accumulate=2)
    yield partial(
        ModelParallelOneProcess, split_points=SPLITS[world_size], devices=stages, accumulate=2
    )
    if world_size == 1:
        yield technique("single", accumulate=2)


def on_ranks(world_size):
    for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
        yield technique(name, builtin)
    for servers in range(1, max(2, world_size)):
        yield technique("parameter_server", servers=servers, accumulate=2)
    yield technique("parameter_server", builtin=True)
    cut = {"split_points": SPLITS[world_size]}
    yield technique("model_parallel", **cut, accumulate=3)
    yield technique("pipeline", **cut, micro_batches=3, schedule="1f1b")
    yield technique("pipeline", builtin=True, **cut, micro_batches=2)
    if world_size == 2:
        # A single worker is one device; the norm of its pushes is limited to clip_norm itself.
        yield technique("async_parameter_server")
        yield technique("async_parameter_server", builtin=True)
        yield technique("ddp", builtin=True, backend="labkit")


def name_of(make):
    options = ", ".join(f"{name}={value}" for name, value in make.keywords.items())
    return f"{make.func.__name__}({options})"


def train(comm, make_strategy, make_model, batches, clip_norm=None):
    """(full state, messages and bytes of the steps, the scaler's state) after some steps."""
    torch.manual_seed(0)
    strategy = make_strategy()
    strategy.clip_norm = clip_norm
    strategy.setup(comm, make_model(), sgd)
    before = comm.messages, comm.bytes_sent
    shares = []
    for inputs, targets in batches:
        mine = share(torch.arange(len(targets)), *strategy.share())
        shares.append((inputs[mine], targets[mine], len(targets)))
    if isinstance(strategy, OwnPaceStrategy):
        list(strategy.train(itertools.cycle(shares), len(batches), 1))
    else:
        for one in shares:
            strategy.step(*one)
    sent = comm.messages - before[0], comm.bytes_sent - before[1]
    strategy.end_epoch()
    state = strategy.full_state()
    strategy.close()
    return state, sent, strategy.scaler.state_dict()


def train_each(comm, cases):
    return {name: train(comm, *case) for name, case in cases.items()}


def plainly(make_model, batches, clip_norm=None):
    """(state, norms) of one device in plain PyTorch; a missing gradient counts as zeros."""
    torch.manual_seed(0)
    model, norms = make_model(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = sgd(trained)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(nn.utils.clip_grad_norm_(trained, clip_norm or math.inf).item())
        optimizer.step()
    return model.state_dict(), norms


@pytest.fixture(scope="module")
def clipped():
    """By number of ranks, then case, what each rank ends with: one run for each number."""
    batches, found = some_batches(BATCHES), {}
    for world_size in (1, 2, 3):
        for ranks, makes in ((1, in_one_process(world_size)), (world_size, on_ranks(world_size))):
            cases = {
                (name_of(make), clip_norm): (make, model_of(make), batches, clip_norm)
                for make in makes
                for clip_norm in (None, CLIP_NORM)
                if clip_norm or make.func in COUNTED
            }
            values = run(train_each, cases, world_size=ranks, device="cpu").values
            for key, (make, *_) in cases.items():
                found[world_size, *key] = make, [rank[key] for rank in values]
    return found


def test_clipping_equals_one_device(clipped):
    for (_, name, clip_norm), (make, ranks) in clipped.items():
        state, norms = plainly(model_of(make), some_batches(BATCHES), clip_norm)
        assert min(norms) < 0.9 * CLIP_NORM < 1.1 * CLIP_NORM < max(norms)
        assert len({checksum(rank[0]) for rank in ranks}) == 1, name
        assert largest_difference(ranks[0][0], state) < 1e-10, (name, clip_norm)
    assert len(clipped) > 40


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_costs_short_messages_where_ranks_have_parts_of_the_gradients(
    clipped, world_size
):
    for (number, name, clip_norm), (make, ranks) in clipped.items():
        if number != world_size or clip_norm is None or make.func not in COUNTED:
            continue
        _, plain = clipped[number, name, None]
        servers = make.keywords.get("servers", 0)
        for rank in range(world_size):
            cost = NOTHING
            if servers > 1 and rank < servers:
                cost = naive_all_reduce_cost(1, 8, servers, rank)
            if "split_points" in make.keywords:
                cost = naive_all_reduce_cost(1, 8, world_size, rank)
            more = [with_it - without for with_it, without in zip(ranks[rank][1], plain[rank][1])]
            assert more == [len(BATCHES) * n for n in (cost.messages, cost.num_bytes)], name


def images():
    """Seven layers; under autocast some of them get 16 bits, and some 32."""
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)]
    layers += [nn.Hardtanh(), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 6)]
    return nn.Sequential(*layers)


def numbers():
    """Without BatchNorm, which normalises shares."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def exact(world_size, amp):
    """Techniques that equal one device to the bit, and its number of micro-batches.

    Some divide by the batch size before backward, some after it, and powers of two divide exactly.
    """
    cut = {"split_points": SPLITS[world_size], "amp": amp}
    yield 1, technique("model_parallel", **cut)
    yield 2, technique("model_parallel", **cut, accumulate=2)
    yield 3, technique("pipeline", **cut, micro_batches=3)
    yield 3, technique("pipeline", **cut, micro_batches=3, schedule="1f1b")
    if world_size < 3:
        # One worker.
        yield 2, technique("parameter_server", amp=amp, accumulate=2)
        yield 1, technique("parameter_server", builtin=True, amp=amp)
    if world_size == 2:
        yield 2, technique("async_parameter_server", amp=amp, accumulate=2)
        yield 1, technique("async_parameter_server", builtin=True, amp=amp)
    if world_size == 1:
        for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
            yield 1, technique(name, builtin, amp=amp)
        for builtin in (False, True):
            yield 2, technique("data_parallel", builtin, devices=("cpu",), amp=amp, accumulate=2)
        stages = {"split_points": SPLITS[4], "devices": [f"cpu:{i}" for i in range(4)]}
        yield 2, partial(ModelParallelOneProcess, **stages, amp=amp, accumulate=2)


def close(world_size, amp):
    """Techniques that add up what their ranks have rounded."""
    for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
        yield technique(name, builtin, amp=amp)
    yield technique("parameter_server", servers=world_size - 1, amp=amp)
    yield technique("pipeline", True, split_points=(1, 2)[: world_size - 1], amp=amp)
    yield technique("pipeline", split_points=(1, 2)[: world_size - 1], amp=amp)


def alone(amp):
    """What the others are compared with."""
    yield (amp, "numbers"), technique("single", amp=amp), numbers
    for parts in (1, 2, 3):
        yield (amp, parts), technique("single", amp=amp, accumulate=parts), images


@pytest.fixture(scope="module")
def halved():
    """By number of ranks, and case, what each rank ends with in mixed precision."""
    batches, found = [(x.float(), y) for x, y in some_batches((8, 4, 2))], {}
    for world_size in (1, 2, 3):
        cases = []
        for amp in ("bf16", "fp16"):
            cases += [(name_of(make), make, images) for _, make in exact(world_size, amp)]
            if world_size == 1:
                cases += alone(amp)
            else:
                cases += [(name_of(make), make, numbers) for make in close(world_size, amp)]
        if world_size == 1:
            cases.append(("full", technique("single"), numbers))
        calls = {name: (make, model, batches) for name, make, model in cases}
        if world_size == 3:
            cut = technique("model_parallel", split_points=(1, 5), amp="bf16")
            calls["cuts"] = cut, images, batches
        values = run(train_each, calls, world_size=world_size, device="cpu").values
        found[world_size] = {name: [rank[name] for rank in values] for name in calls}
    return found


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mixed_precision_equals_one_device_to_the_bit(halved, world_size, amp):
    for parts, make in exact(world_size, amp):
        ((state, _, scaler),) = halved[1][amp, parts]
        for mine, _, mine_scaler in halved[world_size][name_of(make)]:
            assert largest_difference(mine, state) == 0, name_of(make)
            assert mine_scaler["scale"] == scaler["scale"] if scaler else mine_scaler == {}


def test_what_crosses_a_cut_in_mixed_precision_has_two_bytes(halved):
    """Before the convolution 6 numbers, after it 24."""
    for rank, (_, sent, _) in enumerate(halved[3]["cuts"]):
        # Batches of 8, 4 and 2 samples; nothing before the first cut is trained.
        steps = [model_parallel_cost([12, 48], n, rank, 3, first_trained=1) for n in (8, 4, 2)]
        assert sent == (sum(c.messages for c in steps), sum(c.num_bytes for c in steps))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_stays_close_where_shares_are_summed(halved, amp):
    """Sums of shares are rounded to 16 bits one by one: 8 or 11 significant ones."""
    ((full, *_),) = halved[1]["full"]
    ((alone, *_),) = halved[1][amp, "numbers"]
    assert 1e-5 < largest_difference(alone, full) < {"bf16": 2**-5, "fp16": 2**-8}[amp]
    cases = [(world_size, make) for world_size in (2, 3) for make in close(world_size, amp)]
    for world_size, make in cases:
        ranks = halved[world_size][name_of(make)]
        assert len({checksum(state) for state, *_ in ranks}) == 1, name_of(make)
        difference = largest_difference(ranks[0][0], alone)
        assert difference < {"bf16": 2**-8, "fp16": 2**-11}[amp], name_of(make)
    assert len(cases) == 12


def overflowing(comm, make_strategy, model, batches, rank, layer):
    """The states and scales after each step; in the second, one gradient of one rank overflows."""
    torch.manual_seed(0)
    strategy, built, found = make_strategy(), model(), []
    if comm.rank == rank:
        built[layer].weight.register_hook(lambda g: g * (math.inf if len(found) == 1 else 1))
    strategy.clip_norm = 0.75
    # Steps so small that the model hardly changes.
    strategy.setup(comm, built, lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9))
    strategy.scaler.load_state_dict(strategy.scaler.state_dict() | {"scale": 2.0**10})
    for inputs, targets in batches:
        mine = share(torch.arange(len(targets)), *strategy.share())
        strategy.step(inputs[mine], targets[mine], len(targets))
        scaler = strategy.scaler.state_dict()
        found.append((checksum(strategy.full_state()), scaler["scale"], scaler["_growth_tracker"]))
        # A server on RPC's threads would go on with the next step of the workers meanwhile.
        comm.barrier()
    strategy.close()
    return found


def overflow_each(comm, cases):
    return {name: overflowing(comm, *case) for name, case in cases.items()}


def places_of_overflow(world_size):
    """A technique, and the rank and layer whose gradient overflows."""
    last = world_size - 1
    for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
        yield technique(name, builtin), last, 0
    yield technique("parameter_server", builtin=True), last, 0
    # The first slice belongs to server 0, the last one to another.
    for layer in (0, 2):
        yield technique("parameter_server", servers=last), last, layer
    cut = {"split_points": (1, 2)[:last]}
    for rank, layer in ((0, 0), (last, 2)):
        yield technique("model_parallel", **cut), rank, layer
        yield technique("pipeline", **cut), rank, layer
        yield technique("pipeline", True, **cut), rank, layer


def first_trained():
    model = numbers()
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_overflow_on_one_rank_skips_the_update_on_all_and_halves_all_scales(world_size):
    batches, cases = [(x.float(), y) for x, y in some_batches((6, 6, 6, 6))], {}
    places = [(place, numbers) for place in places_of_overflow(world_size)]
    # With only the first layer trained, most stages have no gradient and no optimizer.
    stages = technique("pipeline", split_points=(1, 2)[: world_size - 1])
    places.append(((stages, 0, 0), first_trained))
    for (make, rank, layer), model in places:
        make = partial(make, amp="fp16")
        cases[name_of(make), rank, layer, model.__name__] = make, model, batches, rank, layer
    values = run(overflow_each, cases, world_size=world_size, device="cpu").values
    for name in cases:
        for ends in zip(*(rank[name] for rank in values)):
            assert len(set(ends)) == 1, name
        first, second, third, fourth = values[0][name]
        assert [scale for _, scale, _ in values[0][name]] == [1024, 512, 512, 512], name
        assert [good for *_, good in values[0][name]] == [1, 0, 1, 2], name
        assert first[0] == second[0] != third[0] != fourth[0], name


def overflow_at_own_pace(comm, builtin):
    """The number of updates of the first pushes, and the scale with which this rank ends."""
    torch.manual_seed(0)
    strategy = technique("async_parameter_server", builtin, amp="fp16")()
    built, pushes = numbers(), 0

    def hook(gradient):
        nonlocal pushes
        pushes += 1
        if pushes == 2:
            comm.send(torch.ones(1), 2)
        return gradient * (math.inf if pushes == 2 else 1)

    def batches():
        if comm.rank == 2:  # All ten shares are the other worker's until it has overflowed.
            comm.recv(torch.empty(1), 1)
        yield from itertools.repeat((torch.ones(2, 6), torch.tensor([0, 1]), 4))

    if comm.rank == 1:
        built[0].weight.register_hook(hook)
    strategy.setup(comm, built, lambda p: torch.optim.SGD(p, lr=1e-4))
    strategy.scaler.load_state_dict(strategy.scaler.state_dict() | {"scale": 2.0**10})
    list(strategy.train(batches(), 5, 1))
    state = strategy.full_state()
    updates = strategy.notes()["updates_by_rank"] if comm.rank == 0 else []
    strategy.close()
    return checksum(state), strategy.scaler.get_scale(), updates


@pytest.mark.parametrize("builtin", [False, True])
def test_an_asynchronous_server_skips_a_push_that_overflows_and_tells_all_workers(builtin):
    ranks = run(overflow_at_own_pace, builtin, world_size=3, device="cpu").values
    assert {scale for _, scale, _ in ranks} == {512.0}
    assert len({state for state, *_ in ranks}) == 1
    # Ten shares, of which one made no update.
    assert sum(ranks[0][2]) == 9


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
    assert ours.get_scale() == 2.0**16 / 2 / 2 * 4 / 4
    other = LossScaler()
    other.load_state_dict(theirs.state_dict())
    assert other.state_dict() == ours.state_dict()


def test_fp16_costs_short_messages_of_servers(halved):
    elements = sum(p.numel() for p in numbers().parameters())
    for rank, (_, sent, _) in enumerate(halved[3]["ParameterServer(servers=2, amp=fp16)"]):
        step = parameter_server_cost(elements, 4, 3, rank, 2)
        step += naive_all_reduce_cost(1, 8, 3, rank)
        assert sent == (3 * step.messages, 3 * step.num_bytes)
    elements = sum(p.numel() for p in images().parameters())
    ranks = halved[2]["AsyncParameterServer(amp=fp16, accumulate=2)"]
    for serves, (_, sent, _) in zip((True, False), ranks):
        # Three pushes or pulls; with each a short message of 2 or 4 numbers and the 9 buffers.
        assert sent == (2 * 3, 3 * (elements + (2 if serves else 4) + 9) * 4)
