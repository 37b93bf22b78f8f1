"""Options with every technique: the run equals one device, or it is refused by name.

An option fails that is refused and in ``TAKEN_BY``, or taken and not.
"""

import pytest
import torch
from torch import Tensor, nn

from labkit import RunConfig, run
from labkit.training.loop import fit
from labkit.training.resolve import Own, resolve
from labkit.training.result import largest_difference

# 14 samples in batches of 9 and 5: three workers get shares of 3, and of 2, 2 and 1.
BASE = {"batch_size": 9, "epochs": 2, "model": "own", "dataset": "own", "dtype": "float64"}
THREE, STAGES = {"world_size": 3}, {"world_size": 3, "split_points": "1,4"}
# An asynchronous server with one worker does what one device does.
ONE_WORKER = {"world_size": 2}
SINGLE = "single", False
TECHNIQUES = {
    SINGLE: {},
    ("data_parallel", False): {"devices": "cpu,cpu,cpu"},
    ("data_parallel", True): {"devices": "cpu,cpu,cpu"},
    ("model_parallel in one process", False): {"devices": "cpu"},
    ("async_parameter_server", False): ONE_WORKER,
    ("async_parameter_server", True): ONE_WORKER,
    ("ddp", False): THREE,
    ("ddp", True): THREE,
    ("ring_all_reduce", False): THREE,
    ("sharded", False): THREE,
    ("sharded", True): THREE,
    ("parameter_server", False): THREE,
    ("parameter_server", True): THREE,
    ("model_parallel", False): STAGES,
    ("model_parallel", True): STAGES,
    ("pipeline", False): STAGES,
    ("pipeline", True): STAGES,
    ("mesh", False): {"pp": 3, "split_points": "1,4"},
    ("mesh", True): {"dp": 3},
}
TRIED = [
    {"optimizer": "adamw", "weight_decay": 0.1, "lr_schedule": "cosine", "warmup_epochs": 0.5},
    {"optimizer": "adam", "lr_schedule": "step:1:0.3", "freeze": "features"},
    {"augment": "crop,flip", "resize": 6, "clip_norm": 0.05},
    {"accumulate": 2},
    {"amp": "bf16"},
    {"amp": "fp16"},
    {"sync_batch_norm": True},
    {"compress": "bf16"},
    {"compress": "topk"},
    {"hierarchical": True},
    {"bucket_mb": 0.0},
    {"average_every": 1, "accumulate": 2, "hierarchical": True},
    {"servers": 2},
    {"straggler": "1:1.5"},
    {"max_staleness": 4},
    {"split_points": "2,3"},
    {"micro_batches": 3},
    {"schedule": "1f1b"},
    {"recompute": True},
    {"sequence_parallel": True},
    {"stage": 1},
]


def both(*names):
    return {technique for technique in TECHNIQUES if technique[0] in names}


IN_STEP = both("ddp", "ring_all_reduce")
SERVED = both("parameter_server", "async_parameter_server")
# Options of some techniques; all others are for all of them.
TAKEN_BY = {
    "accumulate": TECHNIQUES.keys()
    - both("pipeline")
    - {("model_parallel", True), ("data_parallel", False), ("mesh", False)},
    "sync_batch_norm": both("single", "parameter_server", "sharded") | IN_STEP,
    "straggler": SERVED | {("ring_all_reduce", False)},
    "bucket_mb": both("ddp") | {("sharded", True), ("mesh", False)},
    "average_every": {("ddp", False)},
    "compress": {("ring_all_reduce", False)},
    "hierarchical": {("ddp", False), ("ring_all_reduce", False)},
    "servers": both("parameter_server"),
    "max_staleness": both("async_parameter_server"),
    "split_points": both("model_parallel", "pipeline") | {("mesh", False)},
    "micro_batches": both("pipeline") | {("mesh", False)},
    "schedule": both("pipeline") | {("mesh", False)},
    "recompute": {("model_parallel", False), ("pipeline", False), ("mesh", False)},
    # For a model of another kind, see tests/strategies/test_tensor_parallel.py.
    "sequence_parallel": set(),
    "stage": both("sharded"),
}
# tests/strategies/test_equality.py trains with each of them alone.
TRAINED_THERE = {"accumulate", "bucket_mb", "servers", "micro_batches", "schedule", "recompute"}
# With these a run moves about as one device does, by this share of the way.
NEAR = {"amp": 0.15, "compress": 2.0}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), pool, nn.Flatten(), nn.Linear(12, 10))


def normed() -> nn.Sequential:
    """The same network with a layer that looks across samples."""
    return net().insert(1, nn.BatchNorm2d(3))


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(14, 1, 8, 8, generator=generator), torch.arange(14) % 10


def job_of(technique, options):
    """What a rank needs for these options; ValueError if the technique does not take them."""
    name, builtin = technique
    settings = BASE | TECHNIQUES[technique] | {"strategy": name.partition(" ")[0]} | options
    settings |= {"builtin": builtin} | ({"dtype": "float32"} if "amp" in options else {})
    own = Own(model=normed if "sync_batch_norm" in options else net, dataset=images)
    config = RunConfig(**settings)
    return config, resolve(config, own)[0], own


def fit_each(comm, jobs):
    """By job, this rank's state (the first rank's alone) and checksum."""
    found = []
    for config, strategy, own in jobs:
        # Otherwise it is the flat ring.
        comm.hosts = ((0, 1), (2,)) if config.hierarchical else (tuple(range(comm.world_size)),)
        report = fit(comm, config, strategy, False, own)
        found.append((report.state, report.checksum))
    return found


def on_one_device(options):
    return {
        name: value for name, value in options.items() if SINGLE in TAKEN_BY.get(name, {SINGLE})
    }


@pytest.fixture(scope="module")
def alone():
    """By options, the state of one device."""
    each = {str(one): one for one in map(on_one_device, TRIED)}
    values = run(fit_each, [job_of(SINGLE, one) for one in each.values()], world_size=1).values
    return {key: state for key, (state, _) in zip(each, values[0], strict=True)}


def moved(state) -> Tensor:
    """How far the parameters are from where they began, [N]."""
    start = net().state_dict()
    return torch.cat([(state[name].double() - start[name]).flatten() for name in start])


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda t: t[0] + " of PyTorch" * t[1])
def test_every_option_equals_one_device_or_is_refused_by_name(alone, technique):
    jobs = {}
    for number, options in enumerate(TRIED):
        if all(technique in TAKEN_BY.get(name, TECHNIQUES) for name in options):
            job = job_of(technique, options)
            if not options.keys() <= TRAINED_THERE:
                jobs[number] = job
        else:
            with pytest.raises(ValueError, match="|".join(options)):
                job_of(technique, options)
    config, strategy, _ = jobs[0]
    ranks = 1 if strategy.traits.in_one_process else config.world_size
    values = run(fit_each, list(jobs.values()), world_size=ranks).values
    for number, by_rank in zip(jobs, zip(*values, strict=True), strict=True):
        options = TRIED[number]
        state, reference = by_rank[0][0], alone[str(on_one_device(options))]
        assert len({checksum for _, checksum in by_rank}) == 1, options
        if near := [NEAR[name] for name in options if name in NEAR]:
            far = moved(reference)
            assert (moved(state) - far).norm() < near[0] * far.norm(), options
        else:
            assert largest_difference(state, reference) < 1e-10, options
