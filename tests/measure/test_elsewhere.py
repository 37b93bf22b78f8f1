"""The one run of all frameworks: what it counts, what it says of who fails, what it leaves."""

import importlib.util
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import is_alive, wait_until

from workbook.measure import elsewhere as shown

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import elsewhere
from elsewhere import CONTENDERS, FRAMEWORKS, ONE_DEVICE, SCRIPTS, Contender
from environments import why_not

# 2 (P - 1) / P x 4 bytes x 29,066 parameters, with P = 2.
ALL_REDUCE_BYTES = 116_264


@pytest.fixture
def module():
    """``experiment.py`` as a script sees it, with nothing counted yet."""
    spec = importlib.util.spec_from_file_location("experiment", SCRIPTS / "experiment.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_experiment_is_the_course_s_model_on_the_shipped_digits(module, tmp_path):
    elsewhere.prepare(tmp_path, steps=3)
    experiment = module.Experiment.load(tmp_path / "experiment.npz")
    state = elsewhere.initial_model().state_dict()
    assert list(experiment.weights) == list(state)
    assert all((value == state[n].numpy()).all() for n, value in experiment.weights.items())
    assert experiment.images.shape == (3, 64, 1, 8, 8)
    for size in (1, 2, 4):
        parts = [experiment.share(rank, size, 1) for rank in range(size)]
        images, labels = map(np.concatenate, zip(*parts))
        assert (images == experiment.images[1]).all()
        assert (labels == experiment.labels[1]).all()
    with pytest.raises(ValueError, match="64 in 3 parts"):
        experiment.share(0, 3, 0)
    # The script on labkit's ring differs from Horovod's in one line.
    names = (elsewhere.HOROVOD_SCRIPT, elsewhere.OUR_SCRIPT)
    texts = ((tmp_path / name).read_text().splitlines() for name in names)
    assert sum(one != other for one, other in zip(*texts, strict=True)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_bytes_are_the_kernel_s_count(module):
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    with near, far:
        before = module.sent_bytes()
        near.sendall(b"x" * 1000)
        far.sendall(b"y" * 77)
        assert module.sent_bytes() - before == 1077
    # A socket that is closed takes no bytes with it.
    assert module.sent_bytes() - before == 1077


SCRIPT = """
import argparse, json, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
for option in ("--experiment", "--report"):
    parser.add_argument(option)
given = parser.parse_args()
report = dict(worker=0, losses=[2.0, 1.0, 0.5, 0.25], step_s=[9.0, 9.0, 0.1, 0.3], versions={})
report["sent_bytes"] = {"worker 0": [900, 900, 10, 20]}
"""
BODIES = {
    ONE_DEVICE: "",
    "dies": "raise ValueError('no such tensor')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "lies": "report['losses'][2] += 0.125",
    "is not a number": "report['losses'][3] = float('nan')",
    "hangs": "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "open(os.environ['PIDS'], 'w').write(f'{os.getpid()} {child.pid}')\ntime.sleep(600)",
}


def test_who_fails_says_so_and_the_others_train_on(tmp_path, monkeypatch):
    pids, end = tmp_path / "pids", "\nopen(given.report, 'w').write(json.dumps(report))\n"
    monkeypatch.setenv("PIDS", str(pids))
    contenders = {}
    for name, body in BODIES.items():
        path = tmp_path / f"{name}.py"
        path.write_text(SCRIPT + body + end)
        contenders[name] = Contender(elsewhere.python, path, "labkit", "TCP", "all-reduce")
    monkeypatch.setattr(elsewhere, "CONTENDERS", contenders)
    monkeypatch.setattr(elsewhere, "LIMIT_S", 5)
    record = elsewhere.run_elsewhere(list(contenders), steps=4, repeats=2)
    rows = {row["contender"]: row for row in record["contenders"]}
    assert {name: row["problem"] for name, row in rows.items() if row["problem"]} == {
        "dies": "ended with 1: ValueError: no such tensor",
        "is killed": "ended with -9: without a word",
        "hangs": "not done after 5 s, and so ended",
    }
    agrees = {name: row["agrees"] for name, row in rows.items() if "agrees" in row}
    assert agrees == {ONE_DEVICE: True, "lies": False, "is not a number": False}
    assert rows["lies"]["difference"] == 0.125
    assert "dies: ended with 1: ValueError" in str(shown.elsewhere_table(record))
    assert "1.2e-01: wrong" in str(shown.elsewhere_table(record))
    # The first steps warm up.
    assert rows[ONE_DEVICE]["step_s"]["median"] == pytest.approx(0.2)
    assert rows[ONE_DEVICE]["sent_bytes"] == {"worker 0": 15}
    for pid in map(int, pids.read_text().split()):
        assert wait_until(lambda pid=pid: not is_alive(pid), 10)
    assert os.getpid() not in map(int, pids.read_text().split())


@pytest.mark.slow
def test_labkit_s_techniques_and_pytorch_s_ddp_train_as_one_device_does():
    names = ["labkit parameter_server over TCP", "labkit ring_all_reduce over TCP", "PyTorch DDP"]
    names += ["labkit.horovod"]
    record = elsewhere.run_elsewhere(names, steps=3, repeats=1)
    rows = {row["contender"]: row for row in record["contenders"]}
    assert rows.keys() == {ONE_DEVICE, *names}
    for row in rows.values():
        assert row["agrees"]
        assert not row["problem"]
        for process, num_bytes in row["sent_bytes"].items() if row["messages"] == "TCP" else ():
            formula = row["formula_bytes"].get(process.split()[0], 0)
            # On top of tensors come headers.
            assert formula <= num_bytes <= 1.02 * formula
    assert rows["PyTorch DDP"]["formula_bytes"] == {"worker": ALL_REDUCE_BYTES}
    assert rows["PyTorch DDP"]["versions"] == {"torch": torch.__version__}


OTHERS = [name for name, one in CONTENDERS.items() if one.framework.lower() in FRAMEWORKS]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_frameworks_agree(name):
    if missing := why_not(CONTENDERS[name].framework.lower()):
        pytest.skip(missing)
    _, row = elsewhere.run_elsewhere([name], steps=8, repeats=1)["contenders"]
    assert not row["problem"]
    assert row["agrees"], row["difference"]
    formula = row["formula_bytes"].get("worker", 0)
    if row["messages"] == "TCP":
        sent = [n for process, n in row["sent_bytes"].items() if process.startswith("worker")]
        # On top of tensors come headers, gRPC and images, and Horovod's negotiation.
        assert formula < max(sent) < 1.5 * formula
