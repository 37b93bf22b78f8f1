"""The tool that adds MPI to the all-reduce bench; it never waits for ranks that will not come."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_mpi.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("bench_mpi", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def mpirun(monkeypatch, tmp_path):
    """Give this machine an mpirun that is the shell script it is called with."""
    program = tmp_path / "mpirun"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(script):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return install


def test_what_is_missing_is_said(tool, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tool.main([]) == 2
    assert capsys.readouterr().err == "bench_mpi: mpi4py is not installed\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(tool.NoMpiError, match="there is no mpirun"):
        tool.find(2)


def test_an_mpi_that_does_not_run_is_not_a_contender(tool, mpirun):
    mpirun("echo a line >&2; echo no slots here >&2; exit 1")
    with pytest.raises(tool.NoMpiError, match="no slots here"):
        tool.find(2)
    mpirun("echo 1 Some MPI")
    with pytest.raises(tool.NoMpiError, match="asked for 2 ranks of one run, and made 1"):
        tool.find(2)
    mpirun("exit 3")
    message = "^mpirun ended with code 3 after 0 of 2 ranks had connected$"
    with pytest.raises(RuntimeError, match=message), tool.started(2):
        pass


def test_mpi_ranks_are_waited_for_only_while_some_are_missing(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "PATIENCE_S", 0.0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "turns"))
        listener.listen(2)

        def connect():
            rank = stack.enter_context(socket.socket(socket.AF_UNIX))
            rank.connect(listener.getsockname())

        connect()
        with pytest.raises(RuntimeError, match="1 of 2 MPI ranks connected within 0 s"):
            tool.accept(listener, 2, lambda: None)
        connect()
        connect()
        accepted = tool.accept(listener, 2, lambda: 3)
        assert len([stack.enter_context(connection) for connection in accepted]) == 2


def test_mpi_takes_its_turns_where_it_is_installed(tool, tmp_path):
    try:
        tool.find(2)
    except tool.NoMpiError as error:
        pytest.skip(str(error))
    record = tmp_path / "mpi.json"
    words = ["--world-size", "2", "--sizes", "4", "--repeats", "2", "--json", str(record)]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "against MPI" in done.stdout
    assert '"contender": "MPI"' in record.read_text()
