"""Every option with every technique: the run equals one device, or it is refused by name.

Each technique is tried with each option of ``TRIED``, and with three pairs of an optimizer and a
schedule, in rotation. A combination fails that is refused and in ``TAKEN_BY``, or taken and not.
"""

import os
import tempfile
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from ranks import travel_by_value
from torch import Tensor, nn

from labkit import RunConfig, run
from labkit.training.loop import fit
from labkit.training.resolve import Own, resolve
from labkit.training.result import largest_difference

travel_by_value(__name__)

SETTINGS = [setting.name for setting in fields(RunConfig)]
# 14 samples in batches of 9 and 5: three workers get shares of 3, and of 2, 2 and 1.
BASE = {"batch_size": 9, "epochs": 2, "model": "own", "dataset": "own", "dtype": "float64"}
THREE, STAGES = {"world_size": 3}, {"world_size": 3, "split_points": "1,4"}
# An asynchronous server with one worker does what one device does.
ONE_WORKER = {"world_size": 2}
TECHNIQUES = {
    ("single", False): {},
    ("data_parallel", False): {"devices": "cpu,cpu,cpu"},
    ("data_parallel", True): {"devices": "cpu,cpu,cpu"},
    ("model_parallel in one process", False): {"devices": "cpu"},
    ("async_parameter_server", False): ONE_WORKER,
    ("async_parameter_server", True): ONE_WORKER,
    ("ddp", False): THREE,
    ("ddp", True): THREE,
    ("ring_all_reduce", False): THREE,
    ("parameter_server", False): THREE,
    ("parameter_server", True): THREE,
    ("model_parallel", False): STAGES,
    ("model_parallel", True): STAGES,
    ("pipeline", False): STAGES,
    ("pipeline", True): STAGES,
}
# The values that are tried, of options of all techniques and of options of some.
TRIED = {
    "optimizer": ("adam", "adamw"),
    "weight_decay": (0.1,),
    "lr_schedule": ("step:1:0.3", "cosine"),
    "warmup_epochs": (0.5,),
    "clip_norm": (0.05,),
    "augment": ("crop,flip",),
    "resize": (6,),
    "weights": ("{weights}",),
    "freeze": ("features",),
    "accumulate": (2,),
    "amp": ("bf16", "fp16"),
    "sync_batch_norm": (True,),
    "compress": ("bf16", "topk"),
    "hierarchical": (True,),
    "bucket_mb": (0.0,),
    "servers": (2,),
    "straggler": ("{last}:1.5",),
    "max_staleness": (4,),
    "split_points": ("2,3",),
    "micro_batches": (3,),
    "schedule": ("1f1b",),
}


def both(*names):
    return {technique for technique in TECHNIQUES if technique[0] in names}


IN_STEP = both("ddp", "ring_all_reduce")
SERVED = both("parameter_server", "async_parameter_server")
# Options of some techniques; all others are for all of them.
TAKEN_BY = {
    "accumulate": TECHNIQUES.keys()
    - both("pipeline")
    - {("model_parallel", True), ("data_parallel", False)},
    "sync_batch_norm": both("single", "parameter_server") | IN_STEP,
    "straggler": SERVED | {("ring_all_reduce", False)},
    "bucket_mb": both("ddp"),
    "compress": {("ring_all_reduce", False)},
    "hierarchical": {("ddp", False), ("ring_all_reduce", False)},
    "servers": both("parameter_server"),
    "max_staleness": both("async_parameter_server"),
    "split_points": both("model_parallel", "pipeline"),
    "micro_batches": both("pipeline"),
    "schedule": both("pipeline"),
}
# What one device has no use for.
NOT_ALONE = TAKEN_BY.keys() - {"accumulate", "sync_batch_norm"}
# What makes no difference on one device.
CHANGE_NOTHING = {"accumulate", "sync_batch_norm"}
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


def own_of(options) -> Own:
    return Own(model=normed if "sync_batch_norm" in options else net, dataset=images)


# Files of other parameters than those of the network.
WEIGHTS = {
    make: Path(tempfile.gettempdir(), f"weights of {make.__name__} {os.getpid()}.pt")
    for make in (net, normed)
}
EACH = [{name: value} for name, values in TRIED.items() for value in values]
# Each optimizer with each schedule.
RATES = [
    {"optimizer": optimizer, "lr_schedule": schedule, "warmup_epochs": warmup, "weight_decay": 0.1}
    for optimizer in ("sgd", "adam", "adamw")
    for schedule, warmup in (("constant", 0.5), ("step:1:0.3", 0.5), ("cosine", 1))
]


def is_taken(technique, options) -> bool:
    """Whether the table says that this technique takes these options."""
    return all(technique in TAKEN_BY.get(name, TECHNIQUES) for name in options)


def cases():
    """(technique, options) of the walk."""
    others = [{}, *(one for one in EACH if one.keys().isdisjoint(RATES[0]))]
    yield from ((("single", False), one) for one in EACH)
    for turn, technique in enumerate(TECHNIQUES):
        # Three optimizers with three schedules; the next technique has the next three pairs.
        rates = (RATES[3 * row + (row + turn) % 3] for row in range(3))
        yield from ((technique, options) for options in (*others, *rates))


CASES = list(cases())


def settings_of(technique, options) -> dict:
    (name, builtin), dtype = technique, {"dtype": "float32"} if "amp" in options else {}
    found = BASE | TECHNIQUES[technique] | options | dtype
    found |= {"strategy": name.partition(" ")[0], "builtin": builtin}
    names = {"last": found.get("world_size", 1) - 1, "weights": WEIGHTS[own_of(options).model]}
    texts = {name: found[name].format(**names) for name in ("straggler", "weights") & found.keys()}
    return found | texts


def alone(options) -> tuple:
    """The options of one device that makes the same updates."""
    return tuple(item for item in options.items() if item[0] not in NOT_ALONE)


def key_of(technique, options) -> tuple:
    return technique, *options.items()


def job_of(technique, options):
    """(config, strategy), or the words of a refusal."""
    try:
        config = RunConfig(**settings_of(technique, options))
        strategy = resolve(config, own_of(options))[0]
    except ValueError as error:
        return str(error)
    return config, strategy


def fit_each(comm, jobs):
    """By job, this rank's state (the first rank's alone) and checksum, or what was refused."""
    found = {}
    for key, (config, strategy) in jobs.items():
        # Otherwise it is the flat ring.
        comm.hosts = ((0, 1), (2,)) if config.hierarchical else (tuple(range(comm.world_size)),)
        report = fit(comm, config, strategy, False, own_of(dict(key[1:])))
        found[key] = report.state, report.checksum
    return found


@pytest.fixture(scope="module")
def weights():
    for make, path in WEIGHTS.items():
        torch.save({name: value + 0.1 for name, value in make().state_dict().items()}, path)
    yield
    for path in WEIGHTS.values():
        path.unlink()


@pytest.fixture(scope="module")
def trained(weights):
    """By technique and options: the words of a refusal, or (state, checksum) by rank."""
    singles = [(("single", False), dict(alone(options))) for _, options in CASES]
    found, jobs = {}, defaultdict(dict)
    threads = torch.get_num_threads()
    # The checks run a tiny model; several threads would wait for each other.
    torch.set_num_threads(1)
    for key, (technique, options) in {key_of(*one): one for one in (*singles, *CASES)}.items():
        job = job_of(technique, options)
        if isinstance(job, str):
            found[key] = job
            continue
        config, strategy = job
        jobs[1 if strategy.in_one_process else config.world_size][key] = job
    torch.set_num_threads(threads)
    for ranks, some in jobs.items():
        values = run(fit_each, some, world_size=ranks, timeout_s=3600).values
        found |= {key: [reports[key] for reports in values] for key in some}
    return found


def moved(state) -> Tensor:
    """How far the parameters are from where they began, [N]."""
    start = (net() if len(state) == len(net().state_dict()) else normed()).state_dict()
    return torch.cat([(state[name].double() - start[name]).flatten() for name in start])


def wrong(trained, technique, options) -> str:
    """What is wrong with a combination; empty if nothing is."""
    outcome, due = trained[key_of(technique, options)], is_taken(technique, options)
    if isinstance(outcome, str):
        said = [word for word in (*SETTINGS, technique[0].partition(" ")[0]) if word in outcome]
        is_named = len(said) > 1 and not options.keys().isdisjoint(said)
        return "" if is_named and not due else f"refused: {outcome}"
    if not due:
        return "taken, and the table says that it is not"
    if len({checksum for _, checksum in outcome}) > 1:
        return "the ranks end apart"
    state, (((reference, _),)) = outcome[0][0], trained[("single", False), *alone(options)]
    tolerance = max((NEAR[name] for name in options if name in NEAR), default=None)
    if tolerance is None:
        difference, tolerance = largest_difference(state, reference), 1e-10
    else:
        far = moved(reference)
        difference = ((moved(state) - far).norm() / far.norm()).item()
    return "" if difference < tolerance else f"off by {difference:.2g}, at most {tolerance}"


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda t: t[0] + " of PyTorch" * t[1])
def test_every_combination_equals_one_device_or_is_refused_by_name(trained, technique):
    words = {str(o): wrong(trained, technique, o) for t, o in CASES if t == technique}
    assert {options: word for options, word in words.items() if word} == {}


@pytest.mark.parametrize("name", sorted(TRIED.keys() - NOT_ALONE - CHANGE_NOTHING))
def test_an_option_changes_the_run(trained, name):
    ((plain, _),) = trained[(("single", False),)]
    for value in TRIED[name]:
        ((state, _),) = trained[("single", False), (name, value)]
        assert (moved(state) - moved(plain)).norm() > 1e-6 * moved(plain).norm()
