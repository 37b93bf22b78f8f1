"""A run that was interrupted and goes on ends as one that was not, to the bit."""

import functools
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from labkit import RunConfig, run, train_with
from labkit.engine.runtime.worker import seed_random_numbers
from labkit.training.checkpoint_files import newest
from labkit.training.loop import fit
from labkit.training.resolve import make_strategy
from labkit.training.work import take_own
from labkit.workload.transformer import gpt

# 110 = 5 x 20 + 10: six steps in an epoch, and a last batch that three ranks do not divide.
SMALL = {"epochs": 2, "train_size": 110, "batch_size": 20, "lr": 0.02}


def make_model():
    """Batch statistics and dropout, which have states of their own."""
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(16, 10))


def without_dropout():
    return nn.Sequential(*(layer for layer in make_model() if not isinstance(layer, nn.Dropout)))


def small_gpt():
    return nn.Sequential(*gpt((64,), 80, width=24, num_heads=4, num_blocks=1))


def small_moe():
    return nn.Sequential(*gpt((64,), 80, width=24, num_heads=4, num_blocks=1, num_experts=3))


def job(strategy, world_size=1, *, model=make_model, **settings):
    own, settings = take_own(SMALL | {"model": model} | settings)
    return RunConfig(strategy, world_size=world_size, **settings), own


def in_turn_from(comm, jobs, folder, step):
    """For each job what a run reports: without checkpoints, with them, and from one of them."""
    found, threads = {}, torch.get_num_threads()

    def once(config, own, start=None):
        # Replicas in threads have divided them, and would do so again.
        torch.set_num_threads(threads)
        seed_random_numbers(comm.rank) if start is None else torch.manual_seed(99)
        report = fit(comm, config, make_strategy(config, own_parts=own), False, own, start)
        return repr([{**row, "seconds": 0} for row in report.epochs]), report.checksum

    for name, (config, own) in jobs.items():
        comm.hosts = ((0, 1), (2,)) if config.hierarchical else (tuple(range(comm.world_size)),)
        place = {"checkpoint_dir": f"{folder}/{name}", "checkpoint_every": 2}
        kept = replace(config, **place)
        found[name] = [once(config, own), once(kept, own)]
        comm.barrier()
        start = Path(folder, name, f"step-{step:08d}")
        found[name].append(once(replace(kept, resume=True), own, start))
    return found


def all_equal(jobs, world_size, folder, step=10):
    """Check that runs of ``jobs`` go on from ``step`` to where they ended, on every rank."""
    values = run(in_turn_from, jobs, str(folder), step, world_size=world_size).values
    for rank, found in enumerate(values):
        for name in jobs:
            whole, kept, continued = found[name]
            assert kept == whole, (name, rank, "saving has changed the run")
            assert continued == whole, (name, rank)


SCHEDULED = {"lr_schedule": "cosine", "warmup_epochs": 0.5, "optimizer": "adamw"}


def test_techniques_in_one_process_go_on_to_the_bit(tmp_path):
    jobs = {
        "single": job("single", amp="bf16", accumulate=2, **SCHEDULED),
        # Threads would take turns with the same random numbers.
        "data_parallel": job("data_parallel", 2, model=without_dropout),
        "model_parallel": job("model_parallel", devices="cpu"),
        "nn.DataParallel": job("data_parallel", 2, builtin=True),
    }
    all_equal(jobs, 1, tmp_path)


def test_techniques_on_two_ranks_go_on_to_the_bit(tmp_path):
    jobs = {
        "server_builtin": job("parameter_server", 2, builtin=True),
        "model_parallel": job("model_parallel", 2, **SCHEDULED),
        "pipeline_builtin": job("pipeline", 2, builtin=True, micro_batches=2),
        "topk": job("ring_all_reduce", 2, compress="topk"),
        "cut": job("tensor_parallel", 2, sequence_parallel=True, **OF_TEXT | SCHEDULED),
        "experts": job("expert_parallel", 2, **OF_EXPERTS | SCHEDULED),
        "cut_builtin": job("tensor_parallel", 2, builtin=True, **OF_TEXT),
        "fp16": job("ddp", 2, amp="fp16", clip_norm=0.5),
    }
    all_equal(jobs, 2, tmp_path)


def test_techniques_on_three_ranks_go_on_to_the_bit(tmp_path):
    jobs = {
        "ring": job("ring_all_reduce", 3, **SCHEDULED),
        "ddp": job("ddp", 3, bucket_mb=0.001),
        "ddp_builtin": job("ddp", 3, builtin=True, bucket_mb=0.001),
        "sharded": job("sharded", 3, **SCHEDULED),
        "sharded_1": job("sharded", 3, stage=1, clip_norm=0.5),
        "over_hosts": job("ring_all_reduce", 3, compress="bf16", hierarchical=True),
        "one_server": job("parameter_server", 3),
        "pipeline": job("pipeline", 3, schedule="zero_bubble", micro_batches=3, recompute=True),
    }
    all_equal(jobs, 3, tmp_path)


class LayerDrop(nn.Linear):
    """Numbers of Python's and NumPy's generators decide whether it runs."""

    def forward(self, inputs):
        return super().forward(inputs) if random.random() < np.random.rand() else inputs


def dropping():
    return nn.Sequential(nn.Flatten(), LayerDrop(64, 64), nn.Tanh(), nn.Linear(64, 10))


class Noisy(torch.utils.data.Dataset):
    """Samples that depend on generators in its attributes, and on how many were read."""

    def __init__(self):
        self.of_torch = torch.Generator().manual_seed(1)
        self.others = np.random.default_rng(2)
        self.of_python = random.Random(3)
        self.given = 0

    def __len__(self):
        return 2 * SMALL["train_size"]

    def __getitem__(self, number):
        self.given += 1
        noise = self.others.normal() + self.of_python.random() + 1 / self.given
        return torch.randn(64, generator=self.of_torch) + noise, number % 10


class Counting(torch.optim.SGD):
    """Numbers that are no tensors: by parameter, by group, and its own."""

    updates = 0

    def step(self, closure=None):
        self.updates += 1
        group = self.param_groups[0]
        group["rate"] = group.get("rate", 1.0) * 0.9
        for parameter in group["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            parameter.grad *= group["rate"] / range(99)[state["steps"]] / self.updates
        return super().step(closure)


def scheduled_in_a_hook(parameters):
    optimizer = torch.optim.NAdam(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def test_what_ones_own_parts_carry_goes_on_to_the_bit(tmp_path):
    parts = {"model": dropping, "dataset": Noisy, "lr": None}
    counting = functools.partial(Counting, lr=0.1)
    optimizers = {"ddp": scheduled_in_a_hook, "sharded": counting}
    jobs = {name: job(name, 2, optimizer=o, **parts) for name, o in optimizers.items()}
    all_equal(jobs, 2, tmp_path)


def tied():
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(nn.Flatten(), *layers)


EXACT = {"model": tied, "dtype": "float64", "optimizer": "adamw", "lr_schedule": "cosine"}
# (Where a gradient is about zero, Adam would turn a rounding into a step.)
OF_TEXT = {"model": small_gpt, "dataset": "text", "optimizer": "sgd"}
OF_EXPERTS = OF_TEXT | {"model": small_moe}


@pytest.mark.more
def test_meshes_go_on_to_the_bit(tmp_path):
    both = {"one": {"dp": 2, "tp": 2}, "other": {"pp": 2, "tp": 2, "micro_batches": 2}}
    options = OF_TEXT | SCHEDULED | {"clip_norm": 0.5}
    all_equal({name: job("mesh", **options, **one) for name, one in both.items()}, 4, tmp_path)


# Where a run has been saved, and where it goes on.
MOVES = [
    (("parameter_server", 3), ("model_parallel", 2)),
    (("pipeline", 3), ("parameter_server", 2)),
    (("ddp", 3), ("sharded", 2)),
    (("sharded", 3), ("ddp", 2)),
    (("tensor_parallel", 3), ("single", 1)),
    (("ddp", 2), ("tensor_parallel", 3)),
    (("mesh", 4, {"dp": 2, "tp": 2}), ("mesh", 2, {"pp": 2})),
    (("expert_parallel", 3), ("expert_parallel", 2)),
]
# The data and the model of the techniques that do not train on images.
WORK = {"tensor_parallel": OF_TEXT, "mesh": OF_TEXT, "expert_parallel": OF_EXPERTS}


def trained(folder, technique, **settings):
    place = {"checkpoint_dir": str(folder), "checkpoint_every": 4}
    name, world_size, *sides = technique
    return train_with(name, world_size=world_size, **SMALL | settings | place | dict(*sides))


@functools.cache
def on_one_device(technique):
    return train_with("single", **SMALL | EXACT | WORK.get(technique, {}))


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_other_ranks_and_techniques_end_where_one_device_ends(tmp_path, before, after):
    technique = before[0] if before[0] in WORK else after[0]
    exact = EXACT | WORK.get(technique, {})
    trained(tmp_path, before, **exact)
    # So that it goes on within the second epoch, after 8 of 12 steps.
    shutil.rmtree(tmp_path / "step-00000012")
    result = trained(tmp_path, after, resume=True, **exact)
    due = on_one_device(technique)
    assert "step-00000008" in result.notes["note"]
    assert result.replicas_agree
    assert result.difference_from(due) < 1e-10
    losses = [[row["loss"] for row in one.epochs] for one in (result, due)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model": make_model}, "has drawn random numbers in its steps"),
        ({"compress": "topk"}, "gradients that compress topk has not sent yet"),
    ],
)
def test_what_cannot_be_divided_anew_is_refused(tmp_path, settings, why):
    trained(tmp_path, ("ring_all_reduce", 3), **settings)
    with pytest.raises(ValueError, match=f"world_size 3 there, 2 here.*{why}"):
        trained(tmp_path, ("ring_all_reduce", 2), resume=True, **settings)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("ddp", {"average_every": 2}, "with average_every 2 momenta differ"),
        ("async_parameter_server", {}, "never stop together"),
        ("parameter_server", {"servers": 2}, "each of 2 servers has a part"),
        ("sharded", {"builtin": True}, "in its own way"),
    ],
)
def test_what_has_no_checkpoints_says_so_before_it_starts(tmp_path, name, options, why):
    with pytest.raises(ValueError, match=f"leave checkpoint_dir out: .*{why}"):
        trained(tmp_path, (name, 3), **options)


def test_sigterm_ends_all_ranks_after_a_step_with_a_checkpoint(tmp_path):
    words = "train --strategy ddp --world-size 2 --epochs 900 --device cpu --model mlp --lr 1e-9 "
    words += f"--checkpoint-every 1000000 --checkpoint-dir {tmp_path}"
    command = [sys.executable, "-m", "labkit", *words.split()]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "epoch 1/" in program.stdout.readline()
    program.send_signal(signal.SIGTERM)
    _, said = program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM, said
    assert "labkit: stopped by SIGTERM after " in said
    assert newest(tmp_path)[0] is not None
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".") or p.suffix == ".part"]
