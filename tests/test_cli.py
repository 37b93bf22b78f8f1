"""The command line, as a person uses it."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys

import pytest
import torch
from ranks import is_alive, session_of, wait_until
from safetensors.torch import load_file

from labkit.__main__ import main

TRAIN = [sys.executable, "-m", "labkit", "train"]
PLACED = ["--strategy", "model_parallel", "--devices"]
QUICK = ["--train-size", "128", "--batch-size", "32"]


def call(*words, command=TRAIN, **settings):
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=240, **settings
    )


def test_train_writes_the_promised_object_and_parameters(tmp_path, capsys):
    report, weights = tmp_path / "out.json", tmp_path / "out.safetensors"
    words = ["--strategy", "ring_all_reduce", "--world-size", "3", "--epochs", "2", *QUICK]
    assert main(["train", *words, "--json", str(report), "--save", str(weights)]) == 0
    out = capsys.readouterr().out
    assert "epoch 2/2: loss" in out
    assert "replicas agree: True" in out
    found = json.loads(report.read_text())
    assert found["config"]["strategy"] == "ring_all_reduce"
    numbers = ["loss", "test_accuracy", "seconds", "train_accuracy", "test_loss"]
    assert [list(epoch) for epoch in found["epochs"]] == [numbers] * 2
    assert {"compute", "share_reduce", "share_only", "update"} <= found["phases_s"].keys()
    assert len(found["bytes_sent"]) == len(found["messages"]) == 3
    assert found["hardware"]["cores"] >= 1
    assert found["versions"]["torch"] == torch.__version__
    assert sum(tensor.numel() for tensor in load_file(weights).values()) == 29_066
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.safetensors"]


def test_a_builtin_on_our_backend_shows_the_bytes_that_were_counted(tmp_path, capsys):
    report = tmp_path / "out.json"
    words = ["--strategy", "ddp", "--builtin", "--backend", "labkit", "--world-size", "2"]
    assert main(["train", *words, *QUICK, "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    # Four updates of 29,066 parameters of four bytes, and what rank 0 sends once.
    assert found["bytes_sent"][1] == 4 * 29_066 * 4 < found["bytes_sent"][0]
    assert f"bytes sent by rank: {found['bytes_sent']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "rign_all_reduce"], "(did you mean 'ring_all_reduce'?): choose one of"),
        (["--strategy", "single", "--bach-size", "3"], "unrecognized arguments: --bach-size 3"),
        (["--strategy", "single", "--dataset", "x"], "unknown data set 'x': choose one of digits"),
        (["--strategy", "ring_all_reduce", "--world-size", "4", "--batch-size", "3"], "smaller"),
        (["--strategy", "single", "--device", "cuda:1"], "unknown device 'cuda:1'"),
        (["--strategy", "single", "--epochs", "many"], "--epochs: invalid int value: 'many'"),
        (["--strategy", "single", "--json", "/nowhere/out.json"], "in a folder that exists"),
        (["--strategy", "single", "--dataset", "mnist"], "mnist is not in"),
        (
            ["--strategy", "single", "--json", "a", "--save", "tests/../a"],
            "a and tests/../a are the same file: give two files",
        ),
        (["--strategy", "single", "--json", ""], "cannot write '': give a file"),
        (["--strategy", "single", "--timeout", "inf"], "timeout_s must be at most 1,000,000"),
        ([], "the following arguments are required: --strategy"),
        ([*PLACED, "cpu,cuda:99"], "counted from cuda:0; name others, or leave devices out"),
        ([*PLACED, "cpu,"], "devices must be cpu or cuda:NUMBER, separated by commas, got ''"),
        ([*PLACED, "cpu", "--split-points", "3"], "devices cpu is 1 ranks, split_points 3 is 2"),
    ],
)
def test_errors_of_use_are_one_line_and_exit_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("labkit: error: ")
    assert message in line


def nodes(folder):
    """A pipe, and a null device where the user may make one: never that of the system."""
    made = [folder / "pipe"]
    os.mkfifo(made[0])
    with contextlib.suppress(PermissionError):
        os.mknod(folder / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        made.append(folder / "null")
    return made


@pytest.mark.parametrize("option", ["--json", "--save"])
def test_train_leaves_a_device_and_a_pipe_what_they_are(option, tmp_path, capsys):
    for node in nodes(tmp_path):
        kind = stat.S_IFMT(node.stat().st_mode)
        with pytest.raises(SystemExit) as caught:
            main(["train", "--strategy", "single", "--model", "mlp", *QUICK, option, str(node)])
        assert caught.value.code == 2
        assert stat.S_IFMT(node.stat().st_mode) == kind
        assert f"cannot write {node}: it is not a regular file" in capsys.readouterr().err


TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "x",
}


def test_ranks_that_cannot_be_reached_under_torchrun_are_a_failed_run(monkeypatch, capsys):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        for name, value in (TORCHRUN | {"MASTER_PORT": str(nobody.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        words = ["--strategy", "ring_all_reduce", *QUICK, "--timeout", "1"]
        assert main(["train", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("labkit: rank 1 could not join the others at 127.0.0.1")


def test_a_failed_run_exits_1_and_leaves_an_old_report_alone(tmp_path, capsys):
    report = tmp_path / "out.json"
    report.write_text("old")
    words = ["--strategy", "ring_all_reduce", "--world-size", "2", "--epochs", "999"]
    assert main(["train", *words, "--timeout", "1", "--json", str(report)]) == 1
    err = capsys.readouterr().err
    assert "still going at its deadline of 1 s" in err
    assert "Traceback" not in err
    assert report.read_text() == "old"


@pytest.mark.fresh
def test_ctrl_c_ends_all_ranks():
    words = ["--strategy", "ring_all_reduce", "--world-size", "2", "--epochs", "9999"]
    training = subprocess.Popen(
        [*TRAIN, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert "epoch 1/" in training.stdout.readline()
        group = session_of(training.pid)
        assert len(group) >= 4
        os.killpg(training.pid, 2)
        _, stderr = training.communicate(timeout=20)
    finally:
        training.kill()
    assert training.returncode == 130
    assert stderr.splitlines()[-1] == "labkit: stopped; all ranks have ended"
    assert wait_until(lambda: not any(map(is_alive, group)), 5)


@pytest.mark.fresh
def test_help_as_a_process():
    done = call("--help", command=[sys.executable, "-m", "labkit"])
    assert done.returncode == 0
    assert {"train", "doctor", "lab"} <= set(done.stdout.replace(",", " ").split())
