"""The scripts for one device, one machine, several machines, and Slurm, as learners start them."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from agents import SCRIPTS, WORK, Agents
from elastic_work import SAMPLES, make_dataset, make_model
from safetensors.torch import load_file

from labkit import train_with
from labkit.training.result import largest_difference
from labkit.workload.samples import batch_slices, epoch_order, share

pytestmark = pytest.mark.skipif(shutil.which("ip") is None, reason="no ip: not on Linux")
BATCH = 10
STEPS = -(-SAMPLES // BATCH)


def one_device(epochs):
    """The run without ranks, which all others have to equal."""
    numbers = {"batch_size": BATCH, "epochs": epochs, "dtype": "float64"}
    return train_with("single", model=make_model, dataset=make_dataset, **numbers)


def batches(epochs):
    """The samples of each update, by its number from 0."""
    orders = (epoch_order(SAMPLES, epoch=epoch, seed=0) for epoch in range(epochs))
    return [batch for order in orders for batch in batch_slices(order, BATCH)]


def rounds_of(folder):
    """By start of the ranks: how many they were, and the process of each that has begun."""
    found, paths = [], (folder / f"begun-{rank}" for rank in itertools.count())
    for rank, log in enumerate(itertools.takewhile(Path.exists, paths)):
        starts = [line.split() for line in log.read_text().splitlines()]
        if rank == 0:
            found = [(int(world_size), []) for world_size, _ in starts]
        larger = [processes for world_size, processes in found if world_size > rank]
        for processes, (_, process) in zip(larger, starts):
            processes.append(int(process))
    return found


def first_step(steps, rank, world_size, due):
    """The update with which a rank has begun: all that it did is its share of this and later."""
    for first in range(len(due)):
        shares = [share(batch, rank, world_size).tolist() for batch in due[first:]]
        if steps == shares[: len(steps)]:
            return first
    raise AssertionError(f"rank {rank} of {world_size} had other samples: {steps}")


def check_samples(agents, epochs, world_sizes):
    """Each update was made of its whole batch, once: no sample is lost or seen twice.

    Returns:
        By start of the ranks, the update with which they have begun, and how far they came.
    """
    due, done, begun = batches(epochs), agents.steps(), []
    found = rounds_of(agents.folder)
    # Ranks may have ended before their first step.
    found = [one for one in found if len(one[1]) == one[0] and done.keys() >= set(one[1])]
    assert [world_size for world_size, _ in found] == world_sizes
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
    losses = [row["loss"] for row in due.epochs]
    assert [row["loss"] for row in report["epochs"]] == pytest.approx(losses, rel=1e-12)
    hidden = [path.name for path in (folder / "checkpoints").iterdir() if path.name[0] == "."]
    assert hidden == []


def outputs(epochs):
    files = "--json", "out.json", "--save", "end"
    return [*WORK, "--epochs", str(epochs), *files]


def newest(folder):
    """The number of the newest checkpoint."""
    steps = [int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")]
    return max(steps, default=0)


@pytest.mark.fresh
def test_a_machine_that_joins_and_is_lost(tmp_path):
    """One machine with two ranks; another with one joins, and loses its power."""
    conf = "last_call_timeout=1,keep_alive_interval=1"
    given = {"NODES": "1:2", "RUN": f"test-{os.getpid()}", "DIR": "checkpoints", "CONF": conf}
    words = "127.0.0.1", *outputs(30), "--checkpoint-every", "3"
    with Agents(tmp_path, pace_s=0.3, **given) as agents:

        def trains_with(world_size):
            """Whether so many ranks train, and have saved something."""
            *_, (begun, processes) = [(0, []), *rounds_of(tmp_path)]
            done = agents.steps()
            steps = [len(done.get(process, [])) for process in processes]
            return begun == world_size == len(steps) and min(steps) > 4

        agents.start("first", "many_nodes.sh", *words, RANKS="2")
        agents.wait_until(lambda: trains_with(2))
        agents.start("second", "many_nodes.sh", *words, RANKS="1", IS_HOST="0")
        agents.wait_until(lambda: trains_with(3))
        agents.kill("second")
        agents.wait_until(lambda: trains_with(2))
        agents.hurry()
        assert agents.wait("first") == 0, agents.told("first")
        told = agents.told("first")
        first, larger, smaller = check_samples(agents, 30, [2, 3, 2])
    # That a machine joins is no failure: all ranks have ended after the same step.
    assert f"stopped by SIGTERM after {larger[0]} of 300 steps, with a checkpoint" in told
    assert first[1] == larger[0]
    # Lost are the steps since the newest checkpoint, and made again.
    assert f"continues from step-{smaller[0]:08d}" in told
    assert 0 <= larger[1] - smaller[0] <= 2 * 3
    check_result(tmp_path, 30)


@pytest.mark.fresh
def test_a_rank_that_is_killed_on_one_machine(tmp_path):
    """torchrun starts as many ranks anew: they end equal to the bit to ranks that never ended."""
    words = *outputs(2), "--checkpoint-every", "3"
    with Agents(tmp_path, pace_s=0.2, RANKS="2", DIR="checkpoints") as agents:
        agents.start("node", "one_node.sh", *words)
        agents.wait_until(lambda: newest(tmp_path) > 2)
        victim = rounds_of(tmp_path)[0][1][1]
        os.kill(victim, signal.SIGKILL)
        agents.hurry()
        assert agents.wait("node") == 0, agents.told("node")
        begun = check_samples(agents, 2, [2, 2])
    assert begun[1][0] >= 3
    check_result(tmp_path, 2)
    numbers = {"batch_size": BATCH, "epochs": 2, "dtype": "float64"}
    due = train_with("ddp", world_size=2, model=make_model, dataset=make_dataset, **numbers)
    assert largest_difference(load_file(tmp_path / "end"), due.state) == 0.0


FAKES = {
    "scontrol": """
        if [[ $1 == show ]]; then for _ in $(seq "$SLURM_JOB_NUM_NODES"); do echo 127.0.0.1; done
        else echo "$@" >> scontrol.log; fi
        """,
    # As many tasks as nodes, all on this machine; signals are passed on.
    "srun": """
        for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
            IS_HOST=$((node == 0)) SLURM_NODEID=$node "$@" & tasks+=($!)
        done
        trap 'kill -TERM "${tasks[@]}"' TERM
        for task in "${tasks[@]}"; do wait "$task" || wait "$task"; done
        """,
}


@pytest.mark.fresh
def test_a_slurm_job_whose_time_is_over_goes_on_in_the_next(tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in FAKES.items():
        (bin_folder / name).write_text("#!/usr/bin/env bash\n" + textwrap.dedent(text))
        (bin_folder / name).chmod(0o755)
    shutil.copy(SCRIPTS / "many_nodes.sh", tmp_path)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job |= {"SLURM_GPUS_ON_NODE": "1"}
    checkpoints = tmp_path / "runs" / str(os.getpid())
    words = *WORK, "--epochs", "999", "--checkpoint-every", "2"
    with Agents(tmp_path, pace_s=0.1, **job) as agents:
        path = os.pathsep.join([str(bin_folder), agents.variables["PATH"]])
        agents.start("job", "slurm.sbatch", *words, PATH=path)
        agents.wait_until(lambda: list(checkpoints.glob("step-*")))
        agents.started["job"].send_signal(signal.SIGTERM)
        assert agents.wait("job") != 0
        steps = [len(one) for one in agents.steps().values()]
        assert len(steps) == 2
        assert steps[0] == steps[1]
        assert (checkpoints / f"step-{steps[0]:08d}" / "facts.json").exists()
        assert (tmp_path / "scontrol.log").read_text() == f"requeue {os.getpid()}\n"
        # The next start of the job has the same command; here it only says it.
        (bin_folder / "torchrun").write_text('#!/usr/bin/env bash\necho "$@" >> torchrun.log\n')
        (bin_folder / "torchrun").chmod(0o755)
        agents.start("job", "slurm.sbatch", *words, PATH=path, SLURM_JOB_NUM_NODES="1")
        assert agents.wait("job") == 0, agents.told("job")
    started = (tmp_path / "torchrun.log").read_text().splitlines()
    assert started
    for line in started:
        assert f"--checkpoint-dir runs/{os.getpid()} --resume" in line


def test_one_device(tmp_path):
    with Agents(tmp_path) as agents:
        agents.start("out", "one_device.sh", *outputs(1))
        assert agents.wait("out") == 0, agents.told("out")
    due = one_device(1)
    assert largest_difference(load_file(tmp_path / "end"), due.state) == 0.0


def test_no_answer_from_the_host(tmp_path):
    with Agents(tmp_path, RUN=f"test-{os.getpid()}", PATIENCE="0") as agents:
        agents.start("out", "many_nodes.sh", "127.0.0.1", IS_HOST="0", RANKS="1")
        assert agents.wait("out") == 1
        assert re.search(r"nothing answers at 127.0.0.1:[23]\d{4}\. ", agents.told("out"))
        agents.start("none", "many_nodes.sh", "nobody.invalid", RANKS="1")
        assert agents.wait("none") == 1
        assert agents.told("none") == "no address of nobody.invalid\n"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.*")), ids=lambda path: path.name)
def test_scripts_name_no_port(path):
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert not re.search(r"port[= ]\d|:\d{4,5}\b|29500|12355", text)
    subprocess.run(["bash", "-n", path], check=True)
