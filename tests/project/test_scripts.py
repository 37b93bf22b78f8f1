"""The scripts for one device, one machine and several machines, as learners start them."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agents import NUMBERS, SCRIPTS, WORK, Agents, check_result, newest
from safetensors.torch import load_file

from labkit import train_with
from labkit.training.result import largest_difference

pytestmark = pytest.mark.skipif(shutil.which("ip") is None, reason="no ip: not on Linux")


def outputs(epochs):
    files = "--json", "out.json", "--save", "end"
    return [*WORK, "--epochs", str(epochs), *files]


@pytest.mark.fresh
def test_a_machine_that_joins_and_is_lost(tmp_path):
    """One machine with two ranks; another with one joins, and loses its power."""
    conf = "last_call_timeout=1,keep_alive_interval=1"
    given = {"NODES": "1:2", "RUN": f"test-{os.getpid()}", "DIR": "checkpoints", "CONF": conf}
    words = "127.0.0.1", *outputs(30), "--checkpoint-every", "3"
    with Agents(tmp_path, pace_s=0.3, **given) as agents:

        def trained_on(world_size):
            """Wait until so many ranks train, and have saved something."""
            agents.wait_until(lambda: [*map(len, agents.rounds())][-1:] == [world_size])
            before = newest(tmp_path / "checkpoints")
            agents.wait_until(lambda: newest(tmp_path / "checkpoints") > before)

        agents.start("first", "many_nodes.sh", *words, RANKS="2")
        trained_on(2)
        agents.start("second", "many_nodes.sh", *words, RANKS="1", IS_HOST="0")
        trained_on(3)
        agents.kill("second")
        trained_on(2)
        agents.hurry()
        assert agents.wait("first") == 0, agents.told("first")
    # That a machine joins is no failure: all ranks have ended after the same step.
    stopped = re.search(r"stopped by SIGTERM after (\d+) of 300 steps", agents.told("first"))
    assert f"continues from step-{int(stopped[1]):08d}" in agents.told("first")
    check_result(tmp_path, 30, tmp_path / "checkpoints")


@pytest.mark.fresh
def test_a_rank_that_is_killed_on_one_machine(tmp_path):
    """torchrun starts as many ranks anew: they end equal to the bit to ranks that never ended."""
    words = *outputs(2), "--checkpoint-every", "3"
    with Agents(tmp_path, pace_s=0.2, RANKS="2", DIR="checkpoints") as agents:
        agents.start("node", "one_node.sh", *words)
        agents.wait_until(lambda: newest(tmp_path / "checkpoints") > 2)
        os.kill(agents.rounds()[0][1], signal.SIGKILL)
        agents.hurry()
        assert agents.wait("node") == 0, agents.told("node")
        assert [len(ranks) for ranks in agents.rounds()] == [2, 2]
    check_result(tmp_path, 2, tmp_path / "checkpoints")
    due = train_with("ddp", world_size=2, epochs=2, **NUMBERS)
    assert largest_difference(load_file(tmp_path / "end"), due.state) == 0.0


def test_one_device(tmp_path):
    with Agents(tmp_path) as agents:
        agents.start("out", "one_device.sh", *outputs(1))
        assert agents.wait("out") == 0, agents.told("out")
    due = train_with("single", epochs=1, **NUMBERS)
    assert largest_difference(load_file(tmp_path / "end"), due.state) == 0.0


def test_no_answer_from_the_host(tmp_path):
    with Agents(tmp_path, RUN=f"test-{os.getpid()}", PATIENCE="0") as agents:
        agents.start("out", "many_nodes.sh", "127.0.0.1", IS_HOST="0", RANKS="1")
        assert agents.wait("out") == 1
        assert re.search(r"nothing answers at 127.0.0.1:[23]\d{4}\. ", agents.told("out"))
        agents.start("none", "many_nodes.sh", "nobody.invalid", RANKS="1")
        assert agents.wait("none") == 1
        assert agents.told("none") == "no address of nobody.invalid\n"
        # Other machines would look for the host in themselves.
        agents.start("itself", "many_nodes.sh", "localhost", RANKS="1")
        assert agents.wait("itself") == 1
        assert "127.0.0.1" in agents.told("itself")


@pytest.mark.more
@pytest.mark.parametrize("launcher", ["recipe.py", "launch.sh"])
def test_the_project_to_copy_trains_where_it_was_copied_to(tmp_path, launcher):
    """Under torchrun with three ranks; by itself it starts two. Both end as one device does."""
    folder = shutil.copytree(SCRIPTS / "project", tmp_path / "mine")
    words = {"recipe.py": [sys.executable, "recipe.py"], "launch.sh": ["bash", "launch.sh"]}[
        launcher
    ]
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"RANKS": "3", "PATH": found}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "replicas agree: True" in done.stdout
    sys.path.insert(0, str(folder))
    try:
        import recipe

        own = {"model": recipe.make_model, "dataset": recipe.make_dataset}
        due = train_with(**recipe.SETTINGS | {"strategy": "single"}, **own)
    finally:
        sys.path.remove(str(folder))
    assert due.test_accuracy > 0.9
    assert largest_difference(load_file(folder / "model.safetensors"), due.state) < 1e-5
