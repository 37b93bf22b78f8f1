"""Processes that launchers other than torchrun start: they join, or are refused in one line."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
import warm_python
from kernel_ports import free_port

import labkit
from labkit.__main__ import main
from labkit.engine.started import started_as_rank

TRAIN = ["--strategy", "ddp", "--train-size", "64", "--batch-size", "16", "--device", "cpu"]
TRAIN += ["--dtype", "float64", "--epochs", "1"]
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def started(words, variables):
    """A process with these variables; its output is read at its end."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, env=os.environ | variables, **settings)


def by_hand(words, size):
    """The outputs of ranks that were started one by one, with the four variables."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [started(words, common | {"RANK": str(rank)}) for rank in range(size)]
    texts = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, texts
    return texts


def check_equals_one_device(path):
    found = json.loads(path.read_text())
    alone = labkit.train_with(
        "single", train_size=64, batch_size=16, epochs=1, dtype="float64", device="cpu"
    )
    assert found["config"]["world_size"] == len(found["bytes_sent"]) == 2
    assert found["epochs"][0]["loss"] == pytest.approx(alone.epochs[0]["loss"], rel=1e-12)


@pytest.mark.fresh
def test_ranks_with_the_four_variables_join(tmp_path):
    """As an operator of Kubernetes sets them: without LOCAL_RANK and what else torchrun sets."""
    path = tmp_path / "out.json"
    words = [warm_python.command(), "-m", "labkit", "train", *TRAIN, "--json", str(path)]
    texts = by_hand(words, 2)
    assert "replicas agree: True" in texts[0]
    assert texts[1] == ""
    check_equals_one_device(path)


@pytest.mark.fresh
def test_what_the_launcher_left_out_is_derived(tmp_path):
    """A function finds torchrun's other variables; its rank's children start no run in it."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, subprocess, sys
        import labkit

        def numbers(comm):
            code = "import labkit; labkit.run(print, world_size=1)"
            inside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert "inside a rank of another run" in inside.stderr, inside.stderr
            return [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]

        print(labkit.run(numbers, world_size=2, device="cpu").values)
        """)
    )
    both = "[['0', '2', '0'], ['1', '2', '0']]\n"
    assert by_hand([warm_python.command(), str(script)], 2) == [both, both]


@pytest.mark.more
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_open_mpi(tmp_path):
    """With the variables of docs/command_line.md its processes join; without, exit code 2."""
    path = tmp_path / "out.json"
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words = [sys.executable, "-m", "labkit", "train", *TRAIN]
    done = subprocess.run([*mpirun, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "OMPI_COMM_WORLD_SIZE=2" in done.stderr
    mpirun += ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    wrapper = "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE exec"
    wrapper += f' "$@" --json {path}'
    subprocess.run([*mpirun, "sh", "-c", wrapper, "sh", *words], check=True, timeout=240)
    check_equals_one_device(path)


FOUR = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
REFUSED = {
    "rank alone": ({"RANK": "0"}, "RANK=0 in the environment, but not WORLD_SIZE, MASTER_ADDR"),
    "size alone": ({"WORLD_SIZE": "4"}, "not RANK, MASTER_ADDR"),
    "left over": ({"LOCAL_RANK": "1"}, "unset LOCAL_RANK"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "not MASTER_ADDR:"),
    "too large": (FOUR | {"RANK": "5"}, "RANK=5 and WORLD_SIZE=2"),
    "no number": (FOUR | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
    "local": (FOUR | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2"),
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "RANK=$OMPI_COMM_W"),
    "MPICH": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "RANK=$PMI_RANK"),
    "srun": ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "RANK=$SLURM_PROCID"),
    "alone in a step": (
        FOUR | {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        "srun has started 2 processes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_half_an_environment_is_refused(case, monkeypatch, capsys):
    """One line that names what is set or missing, and exit code 2; from Python a ValueError."""
    variables, says = REFUSED[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main(["train", *TRAIN])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert says in line
    for call in (lambda: labkit.run(print, world_size=2), lambda: labkit.train_with("ddp")):
        with pytest.raises(ValueError, match=r"RANK|SIZE"):
            call()


@pytest.mark.parametrize(
    "variables",
    [
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},  # a batch script
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_single_process_is_no_rank(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_as_rank() is None
    assert labkit.run(lambda comm: torch.ones(1).item(), world_size=1).values == [1.0]
