"""Every technique, ours and PyTorch's, ends where plain PyTorch on one device ends.

The models have tied, frozen and unused parameters, layers that work in place, and on views;
no number of ranks divides the batches, and some ranks get no sample. Options go by pairs: each
case is trained with or without clipping, accumulation, buckets, and so on.
"""

import itertools
from functools import partial

import pytest
import torch
from odd_models import Mixed, some_batches
from one_device import beside_one_device, ours_or_theirs
from torch import nn

from labkit import strategies

BATCHES = (7, 5, 1, 9)
# It clips some of the batches, see the test.
CLIP_NORM = 0.75


class Spare(nn.Module):
    """A layer whose forward uses some parameters never, and some for some samples only."""

    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.spare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 3)

    def forward(self, inputs):
        chosen, outputs = inputs[:, :1] < -0.05, self.used(inputs)
        is_used = inputs.is_meta or chosen.any()
        return outputs + chosen * self.sometimes(inputs) if is_used else outputs


def odd():
    """Seven layers with tied and frozen parameters, and missing gradients."""
    first, frozen, tied = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
    tied.weight = first.weight
    frozen.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), frozen, tied, nn.Tanh(), Spare(), nn.Linear(6, 6))


def all_used():
    """PyTorch's DDP refuses missing gradients, and one process has no tied stages."""
    model = odd()
    model[3], model[5] = nn.Linear(6, 6), nn.Linear(6, 6)
    return model


def frozen_first():
    model = all_used()
    model[:3].requires_grad_(False)
    return model


def in_place():
    """Stages that begin in place, on what they get or on a view; one output is not contiguous."""
    first, second = (nn.LeakyReLU(0.1, inplace=True) for _ in range(2))
    views = nn.Unflatten(1, (2, 3)), Turned()
    return nn.Sequential(nn.Linear(6, 6), first, nn.Linear(6, 6), *views, second, nn.Linear(6, 6))


class Turned(nn.Module):
    def forward(self, inputs):
        return inputs.flatten(1).t().flip(0).t()


STAGED = (odd, frozen_first, in_place)


def eight():
    """One layer more, so that each of four ranks can hold two stages."""
    return odd().append(nn.Linear(6, 6))


def eight_frozen_first():
    return frozen_first().append(nn.Linear(6, 6))


# Two stages for each rank; the tied ones are on one rank, or on two.
SHORT = {1: (4,), 2: (1, 3, 5), 3: (1, 2, 3, 5, 6), 4: (1, 2, 3, 4, 5, 6, 7)}
CUTS = {1: (), 2: (3,), 3: (3, 5), 4: (1, 4, 5)}


def in_one_process(world_size):
    """(technique, model); its devices are those of one process, which is one rank."""
    replicas, names = ("cpu",) * world_size, tuple(f"cpu:{i}" for i in range(world_size))
    for model in (odd, in_place, Mixed):
        yield ours_or_theirs("data_parallel", devices=replicas), model
    yield ours_or_theirs("data_parallel", True, devices=replicas, accumulate=2), odd
    stages = strategies.get("model_parallel", in_one_process=True)
    for model in (all_used, frozen_first, in_place):
        options = {"split_points": CUTS[world_size], "accumulate": 3}
        yield partial(stages, devices=names, **options), model
    if world_size == 1:
        yield ours_or_theirs("single", accumulate=2), odd


def on_ranks(world_size):
    for name, options in (("ring_all_reduce", {"accumulate": 3}), ("ddp", {"bucket_mb": 0.0003})):
        yield ours_or_theirs(name), odd
        yield ours_or_theirs(name, **options), in_place
        yield ours_or_theirs(name), Mixed
    yield ours_or_theirs("ddp", bucket_mb=0, accumulate=3), odd
    yield ours_or_theirs("ddp", True, accumulate=2), all_used
    yield ours_or_theirs("ddp", True, backend="labkit", bucket_mb=0.0003), all_used
    for stage in (1, 2, 3):
        # An odd number, so that each of them is clipped in one stage and not in the next.
        yield ours_or_theirs("sharded", stage=stage, accumulate=3), odd
        yield ours_or_theirs("sharded", stage=stage), (in_place, frozen_first)[stage == 2]
        yield ours_or_theirs("sharded", True, stage=stage), all_used
    yield ours_or_theirs("sharded", True, backend="labkit", accumulate=2), all_used
    for servers in range(1, max(2, world_size)):
        yield ours_or_theirs("parameter_server", servers=servers, accumulate=2), odd
    yield ours_or_theirs("parameter_server", True, servers=max(1, world_size // 2)), odd
    for model in STAGED:
        cut = {"split_points": CUTS[world_size]}
        yield ours_or_theirs("model_parallel", **cut, accumulate=3), model
        yield ours_or_theirs("pipeline", **cut, micro_batches=3), model
        yield ours_or_theirs("pipeline", **cut, micro_batches=3, schedule="1f1b"), model
        cut_in_two = {"micro_batches": 4, "schedule": "zero_bubble"}
        yield ours_or_theirs("pipeline", **cut, **cut_in_two), model
        yield ours_or_theirs("pipeline", **cut, **cut_in_two, recompute=True), model
        yield ours_or_theirs("pipeline", **cut, micro_batches=2, recompute=True), model
        yield ours_or_theirs("pipeline", True, **cut, micro_batches=4, schedule="1f1b"), model
        yield ours_or_theirs("model_parallel", True, **cut), model
        for replicas in (1, 2):
            if world_size % replicas == 0:
                stages = world_size // replicas
                sides = {"dp": replicas, "pp": stages, "split_points": CUTS[stages]}
                yield ours_or_theirs("mesh", **sides, micro_batches=3, bucket_mb=0.0003), model
    for model in (eight, eight_frozen_first):
        turns = {"split_points": SHORT[world_size], "schedule": "interleaved"}
        yield ours_or_theirs("pipeline", **turns, micro_batches=5), model
        yield ours_or_theirs("pipeline", **turns, recompute=True), model
    yield ours_or_theirs("mesh", True, dp=world_size, accumulate=2), all_used
    if world_size == 2:
        # A single worker is one device; the norm of its pushes is limited to clip_norm itself.
        yield ours_or_theirs("async_parameter_server", accumulate=2), odd
        yield ours_or_theirs("async_parameter_server", True), odd


def check(ranks, world_size):
    """Train with all techniques on so many ranks or devices, and compare."""
    makes = on_ranks(world_size) if ranks > 1 or world_size == 1 else ()
    makes = [*makes, *(in_one_process(world_size) if ranks == 1 else ())]
    norms = itertools.cycle((CLIP_NORM, None))
    cases = [(make, model, next(norms)) for make, model in makes]
    judged = some_batches((5,))[0][0]
    found = beside_one_device(cases, some_batches(BATCHES), judged, ranks)
    for (_, model, _), (by_rank, alone) in zip(cases, found, strict=True):
        # Mixed has parameters of float32. Where a model is cut, the last stage has the outputs.
        furthest = 1e-6 if model is Mixed else 1e-10
        torch.testing.assert_close(by_rank[-1].logits, alone.logits, rtol=1e-6, atol=furthest)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_on_ranks(world_size):
    check(world_size, world_size)


@pytest.mark.parametrize("devices", [2, 3])
def test_in_one_process(devices):
    check(1, devices)
