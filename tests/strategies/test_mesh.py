"""A mesh of data, pipeline and tensor parallelism: equal to one device, and who talks to whom."""

import itertools

import pytest
import torch
from odd_models import seeded, sgd
from one_device import ours_or_theirs, some_texts, transformer
from ranks import travel_by_value
from test_tensor_parallel import (
    CLIP_NORM,
    all_end_where_one_device_ends,
    frozen,
    frozen_first,
)
from torch.nn.functional import cross_entropy

from labkit import RunConfig, run
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.schedules.pipeline import stages_on_each
from labkit.strategies.mesh import describe_groups
from labkit.workload.losses import CountedLoss, ShareLoss

travel_by_value(__name__)

# By world size, (dp, pp, tp).
MESHES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1), (1, 1, 3)],
    4: [(2, 1, 2), (1, 2, 2), (2, 2, 1)],
    6: [(3, 2, 1)],
    8: [(2, 2, 2)],
}
# By stage count, of five layers, the first and the last of which share a parameter.
CUTS = {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}


def made(dp, pp, tp, schedule="1f1b"):
    sides = {"dp": dp, "pp": pp, "tp": tp, "split_points": CUTS[pp * stages_on_each(schedule)]}
    options = {"schedule": schedule, "micro_batches": 2, "bucket_mb": 0.002}
    return ours_or_theirs("mesh", **sides, **options)


def cases_on(world_size):
    norms = itertools.cycle((CLIP_NORM, None, CLIP_NORM))
    for dp, pp, tp in MESHES[world_size]:
        ways = [(transformer, "gpipe"), (frozen, "1f1b"), (frozen_first, "1f1b")]
        if tp == 1 < pp:
            ways += [(frozen, "zero_bubble"), *([(transformer, "interleaved")] if pp == 2 else [])]
        for make_model, schedule in ways:
            yield made(dp, pp, tp, schedule), make_model, next(norms)
        if pp == 1 and tp != 3:
            yield (
                ours_or_theirs("mesh", True, dp=dp, tp=tp, accumulate=2),
                transformer,
                next(norms),
            )


@pytest.mark.parametrize(
    ("world_size", "every"),
    [(4, 3), *(pytest.param(n, 1, marks=pytest.mark.more) for n in MESHES)],
)
def test_every_rank_ends_where_one_device_ends(world_size, every):
    all_end_where_one_device_ends([*cases_on(world_size)][::every], world_size)


def sent_to(comm, meshes):
    """By mesh: what each peer was sent in a step, and how large this rank's gradients are."""
    found = []
    for mesh in meshes:
        strategy = made(*mesh)()
        strategy.loss = CountedLoss(ShareLoss.of(cross_entropy))
        strategy.setup(comm, seeded(transformer), sgd)
        ((inputs, targets),) = some_texts((4,))
        mine, before = strategy.part_of(torch.arange(4)), comm.bytes_to.copy()
        strategy.step(inputs[mine], targets[mine], 4)
        sizes = [bucket.flat.numel() for bucket in strategy.buckets]
        found.append((comm.bytes_to - before, sizes))
    return found


def test_a_rank_talks_to_the_ranks_of_its_groups_and_replicas_send_their_gradients():
    meshes = (2, 1, 2), (1, 2, 2), (2, 2, 1)
    for rank, found in enumerate(run(sent_to, meshes, world_size=4, device="cpu").values):
        for (dp, *_), (num_bytes, sizes) in zip(meshes, found, strict=True):
            # Neighbors along the innermost side that is longer than 1, and across.
            assert num_bytes.keys() == {rank ^ 1, rank ^ 2}
            if dp > 1:
                due = sum(ring_all_reduce_cost(n, 8, 2, rank // 2).num_bytes for n in sizes)
                assert num_bytes[rank ^ 2] == due
                assert len(sizes) > 1
    # A rank has half of the cut parameters.
    whole = sum(p.numel() for p in transformer().parameters())
    (_, of_two), *_ = found
    assert whole / 2 < sum(of_two) < whole * 0.6


def test_a_mesh_says_which_ranks_sum_what():
    groups = "(0 1) (2 3) sum activations, (0 2) (1 3) sum gradients"
    assert describe_groups(2, 1, 2) == f"mesh dp 2 x pp 1 x tp 2: ranks {groups}"
    assert "(0 8 ... 56) (1 9 ... 57) ... (7 15 ... 63) sum g" in describe_groups(8, 1, 8)


def test_the_sides_determine_the_world_size():
    assert RunConfig("mesh", dp=2, tp=2).world_size == 4
    with pytest.raises(ValueError, match="dp 2 x pp 1 x tp 2 is a mesh of 4 ranks"):
        made(2, 1, 2)().check_ranks(3)
