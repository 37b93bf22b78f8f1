"""The tool that adds MPI to the all-reduce bench."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_mpi.py"


def test_mpi_takes_its_turns_where_it_is_installed(tmp_path):
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        pytest.skip("mpi4py or mpirun is not installed")
    record = tmp_path / "mpi.json"
    words = ["--world-size", "2", "--sizes", "4", "--repeats", "2", "--json", str(record)]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "against MPI" in done.stdout
    assert "MPI" in [row["contender"] for row in json.loads(record.read_text())["rows"]]
