"""The tool that adds MPI to the all-reduce bench."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_mpi.py"


def test_an_mpi_that_starts_other_ranks_is_not_a_contender(tmp_path):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 1 Some MPI\n")
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [sys.executable, TOOL, "--world-size", "2"]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "asked for 2 ranks of one run, and made 1" in done.stderr


def test_mpi_takes_its_turns_where_it_is_installed(tmp_path):
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        pytest.skip("mpi4py or mpirun is not installed")
    record = tmp_path / "mpi.json"
    words = ["--world-size", "2", "--sizes", "4", "--repeats", "2", "--json", str(record)]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "against MPI" in done.stdout
    assert "MPI" in [row["contender"] for row in json.loads(record.read_text())["rows"]]
