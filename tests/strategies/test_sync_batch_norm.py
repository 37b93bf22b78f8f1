"""SyncBatchNorm: a layer on shares equals BatchNorm on the batch, and a run equals one device."""

import copy
import time
from functools import partial

import pytest
import torch
from odd_models import seeded, sgd, some_batches
from ranks import travel_by_value
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit import WorkerError, run, strategies, train_with
from labkit.collectives import ring_all_reduce
from labkit.config import RunConfig
from labkit.costs.traffic import (
    NOTHING,
    Cost,
    broadcast_cost,
    ddp_update_cost,
    parameter_server_cost,
    ring_all_reduce_cost,
    sync_batch_norm_cost,
)
from labkit.strategies.base import Strategy
from labkit.strategies.ddp.bucketed import BucketedDDP
from labkit.strategies.ddp.naive import NaiveDDP
from labkit.strategies.single import Single
from labkit.strategies.sync_batch_norm import convert
from labkit.training.resolve import make_strategy
from labkit.training.state import checksum, largest_difference
from labkit.workload.losses import sum_cross_entropy
from labkit.workload.models import build_model

travel_by_value(__name__)


# Single layers, forward and backward, next to BatchNorm on the whole batch.


class InEvaluation(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class Scaled(nn.BatchNorm2d):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class OnItsOwn(nn.BatchNorm2d):
    def forward(self, inputs):
        return nn.functional.batch_norm(inputs, None, None, self.weight, self.bias, True)


def frozen_weight():
    layer = nn.BatchNorm2d(4)
    layer.weight.requires_grad_(False)
    return layer


def forgetful():
    """It has running averages, and does not move them."""
    layer = nn.BatchNorm2d(4)
    layer.track_running_stats = False
    return layer


def channels_last(inputs):
    return inputs.contiguous(memory_format=torch.channels_last)


def every_second(inputs):
    return inputs.repeat_interleave(2, dim=3)[..., ::2]


# name -> (makes a layer, the shape of a sample, what is done to the inputs)
LAYERS = {
    "1d": (partial(nn.BatchNorm1d, 5), (5,), None),
    "1d over time": (partial(nn.BatchNorm1d, 3), (3, 4), None),
    "2d": (partial(nn.BatchNorm2d, 4), (4, 3, 2), None),
    "3d": (partial(nn.BatchNorm3d, 2), (2, 2, 3, 2), None),
    "not affine": (partial(nn.BatchNorm2d, 4, affine=False), (4, 3, 2), None),
    "not tracked": (partial(nn.BatchNorm2d, 4, track_running_stats=False), (4, 3, 2), None),
    "cumulative": (partial(nn.BatchNorm2d, 4, momentum=None, eps=0.1), (4, 3, 2), None),
    "frozen weight": (frozen_weight, (4, 3, 2), None),
    "forgetful": (forgetful, (4, 3, 2), None),
    "in evaluation": (partial(InEvaluation, 4), (4, 3, 2), None),
    "own forward": (partial(Scaled, 4), (4, 3, 2), None),
    "channels last": (partial(nn.BatchNorm2d, 4), (4, 3, 2), channels_last),
    "not contiguous": (partial(nn.BatchNorm2d, 4), (4, 3, 2), every_second),
}


def compared(comm, make_layer, shape, change=None, sizes=(3, 0, 4, 1)):
    """The furthest difference from BatchNorm on the whole batch after two passes."""
    generator = torch.Generator().manual_seed(3)
    plain = nn.Sequential(make_layer()).double().train()
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    synced = copy.deepcopy(plain)
    convert(synced, comm, range(comm.world_size))
    sizes = sizes[: comm.world_size]
    mine = slice(sum(sizes[: comm.rank]), sum(sizes[: comm.rank + 1]))
    pairs = []
    for _ in range(2):
        drawn = torch.randn(2, sum(sizes), *shape, generator=generator, dtype=torch.float64)
        whole, gradient = 3 * drawn[0] + 2, drawn[1]
        whole = change(whole) if change else whole
        whole, part = whole.requires_grad_(), whole.detach()[mine].requires_grad_()
        there, here = plain(whole), synced(part)
        there.backward(gradient)
        here.backward(gradient[mine])
        pairs += [(here, there[mine]), (part.grad, whole.grad[mine])]
    for here, there in zip(synced.parameters(), plain.parameters()):
        if here.requires_grad:
            pairs.append((ring_all_reduce(comm, here.grad), there.grad))
    pairs += list(zip(synced.buffers(), plain.buffers(), strict=True))
    assert all(here.stride() == there.stride() for here, there in pairs[:1])
    return max((h - t).abs().max().item() for h, t in pairs if h.numel())


def all_compared(comm):
    return {name: compared(comm, *case) for name, case in LAYERS.items()}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_layer_on_shares_equals_batch_norm_on_the_batch(world_size):
    for found in run(all_compared, world_size=world_size).values:
        assert max(found.values()) < 1e-12, found


def in_other_dtypes(comm):
    """Inputs of 16 bits, those far from zero, and a layer whose inputs need no gradient."""
    generator = torch.Generator().manual_seed(comm.rank)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = (torch.randn(6, 4, 8, 8, generator=generator) + 3).to(dtype).requires_grad_()
        synced, plain = nn.Sequential(nn.BatchNorm2d(4)), nn.BatchNorm2d(4)
        convert(synced, comm, range(2))
        whole = torch.cat([torch.empty_like(inputs), torch.empty_like(inputs)]).detach().float()
        whole[6 * comm.rank : 6 * comm.rank + 6] = inputs.detach()
        whole[6 - 6 * comm.rank : 12 - 6 * comm.rank] = 0
        ring_all_reduce(comm, whole)
        with torch.autocast("cpu", dtype):
            outputs = synced(inputs)
        wide = plain(whole.requires_grad_())
        wide.sin().sum().backward()
        outputs.float().sin().sum().backward()
        mine = slice(6 * comm.rank, 6 * comm.rank + 6)
        assert outputs.dtype == inputs.grad.dtype == dtype
        assert synced[0].weight.grad.dtype == torch.float32
        torch.testing.assert_close(outputs.float(), wide[mine], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(inputs.grad.float(), whole.grad[mine], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(synced[0].running_var, plain.running_var)
    far = 1e6 + 1e-3 * torch.randn(50 + comm.rank, 3, generator=generator, dtype=torch.float64)
    synced = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0).double())
    convert(synced, comm, range(2))
    before = comm.messages
    synced(far).sum().backward()
    return synced[0].running_var / 1e-6, comm.messages - before


def test_half_precision_is_computed_in_single_and_far_means_do_not_cancel():
    for variance, messages in run(in_other_dtypes, world_size=2).values:
        assert (variance > 0.5).all()
        assert (variance < 2).all()
        assert messages == 1  # inputs without a gradient need no message backward


def one_value(comm, size):
    synced = nn.Sequential(nn.BatchNorm1d(3))
    convert(synced, comm, range(comm.world_size))
    try:
        synced(torch.ones(size if comm.rank == 1 else 0, 3))
    except ValueError as error:
        return str(error)


def test_one_value_per_channel_in_all_is_pytorchs_error_on_every_rank():
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    assert run(one_value, 1, world_size=3).values == [str(raised.value)] * 3
    assert run(one_value, 2, world_size=3).values == [None] * 3
    assert run(one_value, 0, world_size=2).values == [None] * 2


def converted(comm):
    shared = nn.BatchNorm1d(4)
    inner = nn.Sequential(shared, nn.ModuleList([nn.BatchNorm2d(3)]))
    model = nn.ModuleDict({"a": shared, "b": inner, "c": nn.ModuleList([shared])})
    hooked = []
    shared.register_forward_hook(lambda *_: hooked.append(1))
    before = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    first, again = (convert(model, comm, range(2)) for _ in range(2))
    assert first is not again
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert model["a"] is shared is inner[0] is model["c"][0]
    assert isinstance(shared, nn.BatchNorm1d)
    assert type(shared).__name__ == "SyncBatchNorm1d"
    copied = copy.deepcopy(model)
    assert copied["a"] is not shared
    assert copied["a"].global_batch is again
    shared(torch.ones(3, 4))
    assert hooked == [1]
    assert shared.num_batches_tracked == 1

    refused = []
    for layer in (OnItsOwn(4), nn.LazyBatchNorm2d()):
        model = nn.Sequential(nn.Identity(), layer)
        try:
            convert(model, comm, range(2))
            model(torch.ones(3, 4, 2, 2))
        except ValueError as error:
            refused.append(str(error))
    assert convert(nn.BatchNorm1d(3), comm, range(1)) is None
    return refused


def test_converting_keeps_parameters_buffers_hooks_and_shared_layers():
    for own, lazy in run(converted, world_size=2).values:
        assert "1 is a BatchNorm with a forward of its own that does not call super()" in own
        assert "1 is a LazyBatchNorm2d whose number of channels is not known yet" in lazy


# Whole techniques, next to one device.


def conv_norm(inputs, outputs, size=3, **options):
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, **options))


class Residual(nn.Module):
    """A small ResNet on [n, 6]; it does not take an empty batch."""

    def __init__(self):
        super().__init__()
        self.stem = conv_norm(1, 3)
        self.first, self.second = conv_norm(3, 4), conv_norm(4, 4)
        self.skip, self.last = conv_norm(3, 4, size=1), nn.Linear(24, 6)

    def forward(self, inputs):
        hidden = self.stem(inputs.view(-1, 1, 2, 3)).relu()
        hidden = self.block(hidden)
        return self.last(hidden.view(len(hidden), -1))

    def block(self, hidden):
        return (self.second(self.first(hidden).relu()) + self.skip(hidden)).relu()


class Again(Residual):
    """A block whose activations are computed again in backward, and a layer that runs twice."""

    def forward(self, inputs):
        hidden = self.stem(inputs.view(-1, 1, 2, 3)).relu()
        hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        hidden = self.second[1](hidden)
        return self.last(hidden.view(len(hidden), -1))

    reentrant = False


class AgainReentrant(Again):
    reentrant = True


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1, momentum=None)
        self.frozen = conv_norm(1, 4, affine=False)
        self.still = InEvaluation(4)
        self.untracked = nn.BatchNorm2d(4, track_running_stats=False)
        self.last = nn.Linear(24, 6)
        self.frozen[0].weight.requires_grad_(False)

    def forward(self, inputs):
        hidden = self.frozen(self.norm(inputs.view(-1, 1, 2, 3)))
        return self.last(self.untracked(self.still(hidden).sin()).flatten(1))


class Branches(nn.Module):
    """Four branches, three layers deep; hooks make each rank wait at other moments."""

    def __init__(self):
        super().__init__()
        layers = [(1, 2), (2, 2), (2, 2)]
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(conv_norm(*sizes), nn.SiLU()) for sizes in layers))
            for _ in range(4)
        )
        self.last = nn.Linear(12, 6)
        self.pause_s = 0.0

    def shake(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def pause(*_):
            if torch.rand((), generator=generator) < 0.2:
                time.sleep(0.004 * torch.rand((), generator=generator).item())

        for module in self.modules():
            module.register_forward_hook(pause)
        for parameter in self.parameters():
            parameter.register_hook(pause)

    def forward(self, inputs):
        images = inputs.view(-1, 1, 2, 3)
        return self.last(sum(branch(images) for branch in self.branches).view(len(inputs), -1))


def trained(comm, make_strategy, make_model, sizes=(7, 5, 2), shakes=False):
    """State, bytes and messages of the steps, and whether an epoch's end changed anything."""
    strategy, model = make_strategy(), seeded(make_model)
    if shakes:
        model.shake(comm.rank)
    strategy.setup(comm, model, sgd)
    before = strategy.sent() or (0, 0)
    for inputs, targets in some_batches(sizes):
        mine = strategy.part_of(torch.arange(len(targets)))
        strategy.step(inputs[mine], targets[mine], len(targets))
    after = strategy.sent() or (0, 0)
    ended = checksum(strategy.model.state_dict())
    strategy.end_epoch()
    is_same = checksum(strategy.model.state_dict()) == ended
    state, notes = strategy.full_state(), strategy.notes()
    strategy.close()
    return state, (after[0] - before[0], after[1] - before[1]), is_same, notes


def made(name, builtin=False, **options):
    technique = strategies.get(name, builtin=builtin)
    return partial(technique, sync_batch_norm=True, **options)


def accumulating(name, builtin=False, **options):
    return made(name, builtin, accumulate=3, **options)


RING, DDP, SERVER = "ring_all_reduce", "ddp", "parameter_server"
# The jobs of one run for each number of ranks.
JOBS = {
    1: {
        **{model.__name__: (Single, model) for model in (Residual, Again, AgainReentrant, Odd)},
        "Branches": (Single, Branches, (7,) * 12),
        "in three": (partial(Single, accumulate=3, sync_batch_norm=True), Residual),
        "alone": (made(RING), Residual),
        "alone, apart": (strategies.get("ring_all_reduce"), Residual),
    },
    2: {
        "ring": (made(RING), Residual),
        "ddp": (made(DDP, bucket_mb=0), Odd),
        "in three": (accumulating(DDP), Residual),
        "server": (made(SERVER), Residual),
    },
    3: {
        "ring": (made(RING), Residual),
        "ring again": (made(RING), AgainReentrant),
        "ddp again": (made(DDP, bucket_mb=0), Again),
        "ring odd": (made(RING), Odd),
        "in three": (accumulating(RING), Residual),
        "torch in three": (accumulating(DDP, True, bucket_mb=0.0001), Residual),
        "torch": (made(DDP, True, backend="labkit"), Odd),
        "server": (made(SERVER), Odd),
        "rpc in three": (accumulating(SERVER, True), Residual),
    },
    4: {
        "ddp": (made(DDP), Residual),
        "storm": (made(DDP, bucket_mb=0), Branches, (7,) * 12, True),
        "two servers": (made(SERVER, servers=2), Residual),
        "server in three": (accumulating(SERVER), Residual),
        "torch": (made(DDP, True), Again),
    },
}
SYNCED = [(ranks, name) for ranks, jobs in JOBS.items() for name in jobs if ranks > 1]


def all_trained(comm, jobs):
    return {name: trained(comm, *job) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def by_job():
    """By number of ranks and name, what each rank has found: one run for each number of ranks."""
    found = {}
    for world_size, jobs in JOBS.items():
        values = run(all_trained, jobs, world_size=world_size).values
        found |= {(world_size, name): [rank[name] for rank in values] for name in jobs}
    return found


@pytest.mark.parametrize(("world_size", "name"), SYNCED)
def test_every_technique_equals_one_device(by_job, world_size, name):
    ranks, model = by_job[world_size, name], JOBS[world_size][name][1]
    is_cut = name.endswith("in three")
    ((alone, *_),) = by_job[1, "in three" if is_cut else model.__name__]
    assert largest_difference(ranks[0][0], alone) < 1e-10
    assert len({checksum(rank[0]) for rank in ranks}) == 1
    servers = range(2 if "two" in name else "server" in name or "rpc" in name)
    layers = sum(isinstance(m, nn.BatchNorm2d) for m in model().modules())
    told = {"sync_batch_norm": {"by": "labkit", "layers": layers}}
    is_alone = world_size - len(servers) == 1
    assert all(rank[3] == ({} if is_alone else told) for rank in ranks)
    # To the bit: the mean of three equal numbers may be another number.
    assert all(rank[2] for rank in ranks[len(servers) :])


def test_on_one_rank_it_changes_nothing(by_job):
    ((apart, *_),), ((state, sent, _, notes),) = by_job[1, "alone, apart"], by_job[1, "alone"]
    assert checksum(state) == checksum(apart)
    assert (sent, notes) == ((0, 0), {})


def times(count: int, cost: Cost) -> Cost:
    return sum([cost] * count, NOTHING)


CHANNELS = (3, 4, 4, 4)


def expected(name: str, world_size: int, rank: int, elements: int) -> Cost:
    """Of three steps of ``Residual``; its buffers are 30 numbers and four counters."""
    micro_batches = 3 if "three" in name else 1
    # Batches of 7, 5 and 2 samples: the last has two micro-batches.
    count = micro_batches * 3 - (micro_batches == 3)
    norms = {"rank": rank, "micro_batches": count}
    if "ring" in name:
        steps = times(3, ring_all_reduce_cost(elements, 8, world_size, rank))
    elif name == "ddp":
        steps = times(3, ddp_update_cost([elements], 8, world_size, rank))
        # Before the first forward nothing can have changed.
        for num_bytes in (30 * 8, 4 * 8):
            steps += times(2, broadcast_cost(num_bytes, 1, world_size, rank))
    else:
        servers = 2 if "two" in name else 1
        steps = times(3, parameter_server_cost(elements, 8, world_size, rank, servers))
        if rank < servers:
            return steps
        norms["rank"], world_size = rank - servers, world_size - servers
    return steps + sync_batch_norm_cost(CHANNELS, world_size, **norms)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(2, "ring"), (3, "ring"), (4, "ddp"), (4, "two servers"), (4, "server in three")],
)
def test_bytes_and_messages_are_those_of_the_formula(by_job, world_size, name):
    elements = sum(p.numel() for p in Residual().parameters())
    for rank, (_, sent, *_) in enumerate(by_job[world_size, name]):
        cost = expected(name, world_size, rank, elements)
        assert sent == (cost.messages, cost.num_bytes)


def replica_steps(comm):
    """Without the training loop, as in a learner's own program; the naive replica, too."""
    found = []
    for kind in (NaiveDDP, partial(BucketedDDP, bucket_mb=0)):
        model = seeded(Residual)
        convert(model, comm, range(2))
        replica = kind(comm, model, op="sum")
        optimizer = sgd(replica.trained)
        for inputs, targets in some_batches((7, 6)):
            mine = slice(3) if comm.rank else slice(3, None)
            optimizer.zero_grad()
            loss = sum_cross_entropy(replica(inputs[mine]), targets[mine])
            (loss / len(targets)).backward()
            optimizer.step()
        found.append(model.state_dict())
    return found


def test_replicas_in_a_learners_own_loop(by_job):
    def alone(comm):
        return trained(comm, Single, Residual, (7, 6))[0]

    (state,) = run(alone, world_size=1).values
    for states in run(replica_steps, world_size=2).values:
        assert max(largest_difference(one, state) for one in states) < 1e-10


SMALL = {"dataset": "digits", "train_size": 36, "batch_size": 17, "epochs": 1}


def test_a_run_equals_one_device_only_with_it():
    settings = SMALL | {"model": seeded(images), "dtype": "float64"}
    alone = train_with("single", sync_batch_norm=True, **settings)
    synced = train_with(RING, world_size=3, sync_batch_norm=True, **settings)
    apart = train_with(RING, world_size=3, **settings)
    assert synced.equals(alone)
    assert not apart.equals(alone)
    assert apart.difference_from(alone) > 1e-3
    assert synced.notes == {"sync_batch_norm": {"by": "labkit", "layers": 2}}
    assert synced.as_dict()["sync_batch_norm"]["layers"] == 2
    assert apart.notes == alone.notes == {}


def images():
    layers = [*conv_norm(1, 4), nn.ReLU(), nn.AvgPool2d(2), *conv_norm(4, 4), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def test_mixed_precision_stays_near_one_device():
    settings = SMALL | {"model": images().float(), "amp": "bf16", "lr": 0.01}
    alone = train_with("single", **settings)
    synced = train_with(DDP, world_size=3, sync_batch_norm=True, **settings)
    assert synced.replicas_agree
    assert synced.epochs[0]["loss"] == pytest.approx(alone.epochs[0]["loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [
        ("async_parameter_server", {}, "no common batch whose statistics .* use parameter_server"),
        ("async_parameter_server", {"builtin": True}, "no common batch"),
        ("model_parallel", {}, "sees the whole .micro-.batch already; leave it out"),
        ("model_parallel", {"devices": "cpu,cpu"}, "sees the whole .micro-.batch already"),
        ("pipeline", {}, "sees the whole .micro-.batch already; leave it out"),
        ("pipeline", {"builtin": True}, "sees the whole .micro-.batch already"),
        ("data_parallel", {}, "threads of one process.* use ddp or ring_all_reduce"),
        ("data_parallel", {"builtin": True}, "nn.DataParallel; use ddp or ring_all_reduce"),
    ],
)
def test_where_it_makes_no_sense_it_is_refused_by_name(strategy, options, reason):
    config = RunConfig(strategy, world_size=2, sync_batch_norm=True, **options)
    with pytest.raises(ValueError, match=f"takes no option sync_batch_norm: .*{reason}"):
        make_strategy(config)


def resnet(comm, make_strategy):
    """Two steps of ResNet-18, the last with fewer samples than ranks."""
    shape, dtype = (1, 8, 8), torch.float64
    model = build_model("resnet18", num_classes=10, input_shape=shape, seed=0, dtype=dtype)
    strategy: Strategy = make_strategy()
    strategy.setup(comm, model, partial(torch.optim.SGD, lr=0.01, momentum=0.9))
    generator = torch.Generator().manual_seed(1)
    for size in (5, 1):
        inputs = torch.randn(size, *shape, generator=generator, dtype=dtype)
        targets = torch.randint(10, (size,), generator=generator)
        mine = strategy.part_of(torch.arange(size))
        strategy.step(inputs[mine], targets[mine], size)
    return strategy.full_state()


@pytest.mark.slow
def test_resnet_equals_one_device():
    (alone,) = run(resnet, Single, world_size=1).values
    states = run(resnet, made(DDP), world_size=2).values
    assert max(largest_difference(state, alone) for state in states) < 1e-10
    assert checksum(states[0]) == checksum(states[1])


def lone_value(comm):
    trained(comm, made(RING), lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (4, 1))


def test_a_last_batch_of_one_value_per_channel_ends_the_run_as_on_one_device():
    with pytest.raises(WorkerError, match="Expected more than 1 value per channel when training"):
        run(lone_value, world_size=2)
