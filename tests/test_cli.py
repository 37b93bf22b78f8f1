"""The command line, as a person uses it."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from ranks import is_alive, session_of, wait_until
from safetensors.torch import load_file

from labkit.__main__ import main
from labkit.training.config import RunConfig

TRAIN = [sys.executable, "-m", "labkit", "train"]
PLACED = ["--strategy", "model_parallel", "--devices"]
QUICK = ["--train-size", "128", "--batch-size", "32"]


@pytest.mark.parametrize("flags", [["-I", "-OO"], ["-W", "error"], ["-X", "dev"]])
def test_each_option_has_a_help_text_whatever_python_does_with_docstrings(flags):
    words = [sys.executable, *flags, "-m", "labkit", "train", "--help"]
    # Wide enough for a line per option.
    environment = os.environ | {"COLUMNS": "500"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for setting in fields(RunConfig):
        assert f"--{setting.name.replace('_', '-')} " in done.stdout
        assert setting.metadata["help"] in done.stdout


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "rign_all_reduce"], "(did you mean 'ring_all_reduce'?): choose one of"),
        (["--strategy", "single", "--bach-size", "3"], "unrecognized arguments: --bach-size 3"),
        (["--strategy", "single", "--epochs", "many"], "--epochs: invalid int value: 'many'"),
        (["--strategy", "single", "--json", "/nowhere/out.json"], "in a folder that exists"),
        (["--strategy", "single", "--json", "a", "--save", "tests/../a"], "are the same file"),
        (["--strategy", "single", "--dataset", "mnist"], "mnist is not in"),
        (["--strategy", "single", "--record", "/dev/null/a"], "record /dev/null/a: /dev/null is"),
        ([], "the following arguments are required: --strategy"),
        ([*PLACED, "cpu,cuda:99"], "counted from cuda:0; name others, or leave devices out"),
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
        _, stderr = training.communicate(timeout=60)
    finally:
        training.kill()
    assert training.returncode == 130
    assert stderr.splitlines()[-1] == "labkit: stopped; all ranks have ended"
    assert wait_until(lambda: not any(map(is_alive, group)), 60)


def test_a_diff_that_is_terminated_leaves_no_records(tmp_path):
    words = [sys.executable, "-m", "labkit", "diff", "--strategy", "single", "--steps", "22"]
    comparing = subprocess.Popen(words, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert wait_until(lambda: list(tmp_path.glob("labkit-diff-*/*")), 60)
        comparing.terminate()
        assert comparing.wait(timeout=60) == 143
    finally:
        comparing.kill()
    assert not list(tmp_path.glob("labkit-diff-*"))
