"""The commands on a GPU server: doctor, bench, compare; and the notebooks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import needs
import pytest
from nbclient import NotebookClient

from labkit.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@needs.gpus(1)
def test_the_doctor_finds_the_gpus_and_stops_at_nothing():
    command = [sys.executable, "-m", "labkit", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "GPUs talk" in done.stdout


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs.gpus(n)) for n in (1, 2, 3)])
def test_the_bench(ranks, tmp_path, capsys):
    """With more ranks than one GPU has, with a GPU for each of two, and on all GPUs."""
    path, world_size = tmp_path / "record.json", min(max(2, ranks), 4)
    words = ["--sizes", "4KiB,1MiB", "--repeats", "3", "--world-size", str(world_size)]
    words += ["--device", "cuda", "--json", str(path)]
    if ranks == 1:
        words += ["--devices", ",".join(["cuda:0"] * world_size)]
    assert main(["bench", *words]) == 0
    record = json.loads(path.read_text())
    assert record["versions"]["nccl"]
    assert record["hardware"]["gpus"]
    assert all(min(row["seconds"]) > 0 for row in record["rows"])
    contenders = {row["contender"] for row in record["rows"]}
    assert ("NCCL" in contenders) == (ranks > 1)


def printed(cell):
    """What a cell prints on stdout."""
    return "".join(out["text"] for out in cell.outputs if out.get("name") == "stdout")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@needs.gpus(1)
def test_a_notebook_runs_and_prints_what_is_stored(notebook):
    """As nbval compares, but that ranks which share a GPU say so on stderr."""
    here = nbformat.read(notebook, as_version=4)
    stored = [printed(cell) for cell in here.cells if cell.cell_type == "code"]
    client = NotebookClient(
        here, timeout=240, resources={"metadata": {"path": ROOT / "notebooks"}}
    )
    client.execute(env=os.environ | {"LABKIT_LIVE": "0"})
    for cell, text in zip((c for c in here.cells if c.cell_type == "code"), stored, strict=True):
        if not {"nbval-ignore-output", "raises-exception"} & set(cell.metadata.get("tags", [])):
            assert printed(cell) == text, cell.source
