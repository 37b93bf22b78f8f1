"""The scripts for one device, one machine, several machines, and Slurm, as learners start them."""

import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from agents import SCRIPTS, WORK, Agents
from elastic_work import SAMPLES, make_dataset, make_model
from safetensors.torch import load_file

from labkit import train_with
from labkit.training.state import largest_difference
from labkit.workload.sampling import batch_slices, epoch_order, share

pytestmark = pytest.mark.skipif(shutil.which("ip") is None, reason="no ip: not on Linux")
BATCH = 10
STEPS = -(-SAMPLES // BATCH)


def one_device(epochs):
    """The run without ranks, which all others have to equal."""
    numbers = {"batch_size": BATCH, "momentum": 0.9, "epochs": epochs, "dtype": "float64"}
    return train_with("single", model=make_model, dataset=make_dataset, **numbers)


def batches(epochs):
    """The samples of each update, by its number from 0."""
    orders = (epoch_order(SAMPLES, epoch=epoch, seed=0) for epoch in range(epochs))
    return [batch for order in orders for batch in batch_slices(order, BATCH)]


def rounds_of(logs):
    """By start of the ranks: how many they were, and the process of each that has begun."""
    found = []
    for rank in itertools.count():
        log = logs / f"rank{rank}.log"
        if not log.exists():
            return found
        starts = re.findall(rf"rank {rank} of (\d+) on \S+, process (\d+),", log.read_text())
        if rank == 0:
            found = [(int(world_size), []) for world_size, _ in starts]
        larger = [processes for world_size, processes in found if world_size > rank]
        for processes, (_, process) in zip(larger, starts):
            processes.append(int(process))


def first_step(steps, rank, world_size, due):
    """The update with which a rank has begun: all that it did is its share of this and later."""
    for first in range(len(due)):
        shares = [share(batch, rank, world_size).tolist() for batch in due[first:]]
        if steps == shares[: len(steps)]:
            return first
    raise AssertionError(f"rank {rank} of {world_size} had other samples: {steps}")


def check_samples(agents, epochs, world_sizes):
    """Each update was made of its whole batch, once: no sample is lost or seen twice."""
    due, done, begun = batches(epochs), agents.steps(), []
    found = rounds_of(agents.folder / "logs")
    # A machine that comes late makes one more start, and ranks may end before their first step.
    found = [one for one in found if len(one[1]) == one[0] and done.keys() >= set(one[1])]
    assert [world_size for world_size, _ in found][-len(world_sizes) :] == world_sizes
    for world_size, processes in found:
        firsts = {
            first_step(done[process], rank, world_size, due)
            for rank, process in enumerate(processes)
        }
        (first,) = firsts
        begun.append((first, first + min(len(done[process]) for process in processes)))
    for (_, end), (first, _) in itertools.pairwise(begun):
        assert first <= end, "the updates between were never made"
    assert begun[0][0] == 0
    assert begun[-1][1] == len(due)
    return begun


def check_result(folder, epochs):
    """The same parameters as on one device, and reports that are whole and not doubled."""
    due = one_device(epochs)
    assert largest_difference(load_file(folder / "end"), due.state) < 1e-10
    report = json.loads((folder / "out.json").read_text())
    assert report["replicas_agree"]
    rows = (folder / "logs" / "epochs.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, epochs + 1))
    losses = [row["loss"] for row in due.epochs]
    assert [row["loss"] for row in report["epochs"]] == pytest.approx(losses, rel=1e-12)
    hidden = [path.name for path in (folder / "checkpoints").iterdir() if path.name[0] == "."]
    assert hidden == [".labkit-lock"]


def outputs(epochs):
    return [*WORK, "--epochs", str(epochs), *"--json out.json --save end --log-dir logs".split()]


@pytest.mark.fresh
def test_a_lost_machine_and_a_new_one(tmp_path):
    """Two machines with two ranks and one: 3 ranks, then 2, then 3 again."""
    conf = "last_call_timeout=3,keep_alive_interval=1"
    given = {"NODES": "1:2", "RUN": f"test-{os.getpid()}", "DIR": "checkpoints", "CONF": conf}
    words = "127.0.0.1", *outputs(4), "--checkpoint-every", "3"
    with Agents(tmp_path, pace_s=0.2, **given) as agents:

        def trains_with(world_size, least_step):
            """Whether so many ranks train, and have saved what they have done."""
            found = rounds_of(tmp_path / "logs")
            steps = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
            return (
                bool(found and steps and found[-1][0] == world_size == len(found[-1][1]))
                and agents.steps().keys() >= set(found[-1][1])
                and int(max(steps)[5:]) >= least_step
            )

        agents.start("first", "many_nodes.sh", *words, RANKS="2")
        agents.start("second", "many_nodes.sh", *words, RANKS="1", IS_HOST="0")
        agents.wait_until(lambda: trains_with(3, 3))
        agents.kill("second")
        agents.wait_until(lambda: trains_with(2, 6))
        agents.start("third", "many_nodes.sh", *words, RANKS="1", IS_HOST="0")
        assert [agents.wait("first"), agents.wait("third")] == [0, 0], agents.told("first")
        told = agents.told("first")
        print(told, rounds_of(tmp_path/"logs"))
        *_, smaller, last = check_samples(agents, 4, [3, 2, 3])
    assert f"continues from step-{smaller[0]:08d}" in told
    # That a machine joins is no failure: all ranks have ended after the same step.
    assert f"stopped by SIGTERM after {last[0]} of 40 steps, with a checkpoint" in told
    assert smaller[1] == last[0]
    check_result(tmp_path, 4)
