"""The commands on a GPU server: doctor, benches, compare; and the notebooks."""

import json
import subprocess
import sys
from pathlib import Path

import needs
import pytest

from labkit.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = {
    "all-reduce": ["--sizes", "4KiB,1MiB", "--repeats", "3", "--world-size"],
    "ddp": ["--models", "small_cnn", "--repeats", "3", "--world-size"],
    "pipeline": ["--models", "mlp", "--repeats", "2", "--world-size"],
    "launch": ["--repeats", "1", "--world-size"],
}


@needs.gpus(1)
def test_the_doctor_finds_the_gpus_and_stops_at_nothing():
    command = [sys.executable, "-m", "labkit", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "GPUs talk" in done.stdout


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs.gpus(n)) for n in (1, 2, 3)])
def test_the_benches(name, ranks, tmp_path, capsys):
    """With more ranks than one GPU has, with a GPU for each of two, and on all GPUs."""
    path, world_size = tmp_path / "record.json", min(max(2, ranks), 4)
    words = [*QUICK[name], str(world_size), "--device", "cuda", "--json", str(path)]
    if ranks == 1:
        words += ["--devices", ",".join(["cuda:0"] * world_size)]
    assert main(["bench", name, *words]) == 0
    record = json.loads(path.read_text())
    (row,) = record["ranks"]
    assert row["share_a_gpu"] == (ranks == 1)
    assert record["versions"]["nccl"]
    assert record["hardware"]["gpus"]
    if name == "all-reduce":
        contenders = {one["contender"] for one in record["rows"]}
        assert ("NCCL" in contenders) == (ranks > 1)
        assert all(one["share_of_limit"] > 0 for one in record["rows"])
        assert ("between_gpus" in record) == (ranks > 1)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@needs.gpus(1)
def test_a_notebook_prints_what_is_stored(notebook):
    words = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout", "240", "-q"]
    words += ["--nbval-sanitize-with", "tests/nbval_sanitize.cfg", str(notebook)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
