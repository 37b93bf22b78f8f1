"""The one run of all frameworks: what it counts, what it says of who fails, what it leaves."""

import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import is_alive, wait_until

from workbook.measure import elsewhere, processes
from workbook.measure.elsewhere import turns
from workbook.measure.elsewhere.run import (
    CONTENDERS,
    ONE_DEVICE,
    Contender,
    formula_bytes,
    measure,
)

# 2 (P - 1) / P x 4 bytes x 29,066 parameters, with P = 2.
ALL_REDUCE_BYTES = 116_264
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


@pytest.fixture
def module():
    """``experiment.py`` as a script sees it, with nothing counted yet."""
    return turns.module_of(turns.SCRIPTS)


def test_the_experiment_is_the_course_s_model_on_the_shipped_digits(module, tmp_path):
    turns.prepare(tmp_path, steps=3)
    experiment = module.Experiment.load(tmp_path / "experiment.npz")
    state = turns.initial_model().state_dict()
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
    theirs = (turns.SCRIPTS / turns.HOROVOD_SCRIPT).read_text().splitlines()
    ours = (tmp_path / turns.OUR_SCRIPT).read_text().splitlines()
    assert sum(one != other for one, other in zip(theirs, ours, strict=True)) == 1
    with pytest.raises(ValueError, match=r"no experiment\.py"):
        turns.prepare(tmp_path, 1, scripts=tmp_path / "nowhere")


@linux_only
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
    "right": "",
    "dies": "raise ValueError('no such tensor')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "tells too little": "report['losses'].pop()",
    "lies": "report['losses'][2] += 0.125",
    "is not a number": "report['losses'][3] = float('nan')",
    "hangs": "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "open(os.environ['PIDS'], 'w').write(f'{os.getpid()} {child.pid}')\ntime.sleep(600)",
}


def of_script(name, **settings):
    take = partial(turns.script_turn, script=f"{name}.py", launch=lambda folder: [sys.executable])
    return Contender(take, messages="TCP", formula="all-reduce", **settings)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A folder with the scripts above."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "experiment.py").write_text((turns.SCRIPTS / "experiment.py").read_text())
    end = "\nopen(given.report, 'w').write(json.dumps(report))\n"
    for name, body in BODIES.items():
        (folder / f"{name}.py").write_text(SCRIPT + body + end)
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    yield folder
    assert list((tmp_path / "scratch").iterdir()) == []


def gone(pids: Path) -> bool:
    return all(wait_until(lambda n=n: not is_alive(int(n)), 10) for n in pids.read_text().split())


def test_who_fails_says_so_and_the_others_train_on(written, tmp_path):
    names = [name for name in BODIES if name != "right"]
    contenders = {ONE_DEVICE: of_script("right")} | {name: of_script(name) for name in names}
    record = measure(contenders, 4, 2, limit_s=5, scripts=written)
    rows = {row["contender"]: row for row in record["contenders"]}
    assert {name: row["problem"] for name, row in rows.items() if row["problem"]} == {
        "dies": "ended with 1: ValueError: no such tensor",
        "is killed": "ended with -9: without a word",
        "tells too little": "losses: 3 numbers for 4 steps",
        "hangs": "not done after 5 s, and so ended",
    }
    agrees = {name: row["agrees"] for name, row in rows.items() if "agrees" in row}
    assert agrees == {ONE_DEVICE: True, "lies": False, "is not a number": False}
    assert rows["lies"]["difference"] == 0.125
    assert "dies: ended with 1: ValueError" in str(elsewhere.elsewhere_table(record))
    assert "Not all lines lie" in elsewhere.elsewhere_figure(record).caption
    # The first steps warm up.
    assert rows[ONE_DEVICE]["seconds"] == [0.1, 0.3] * 2
    assert rows[ONE_DEVICE]["sent_bytes"] == {"worker 0": 15}
    assert gone(tmp_path / "pids")


def test_stopped_it_leaves_no_process_and_no_file(written, tmp_path):
    pids = tmp_path / "pids"

    def stop():
        assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 60)
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        measure({ONE_DEVICE: of_script("hangs")}, 4, 1, limit_s=70, scripts=written)
    thread.join()
    assert gone(pids)


def test_labkit_s_techniques_and_pytorch_s_ddp_train_as_one_device_does():
    names = ["labkit ddp", "labkit parameter_server over TCP"]
    names += ["labkit ring_all_reduce over TCP", "PyTorch DDP"]
    record = elsewhere.run_elsewhere(names, steps=3)
    rows = {row["contender"]: row for row in record["contenders"]}
    assert list(rows) == [ONE_DEVICE, *(name for name in CONTENDERS if name in names)]
    assert all(row["agrees"] and not row["problem"] for row in rows.values())
    ring = rows["labkit ring_all_reduce over TCP"]
    assert set(ring["counted_bytes"].values()) == {ALL_REDUCE_BYTES}
    for name in ("labkit ring_all_reduce over TCP", "PyTorch DDP"):
        for num_bytes in rows[name]["sent_bytes"].values():
            assert ALL_REDUCE_BYTES < num_bytes < 1.02 * ALL_REDUCE_BYTES
    assert max(rows["labkit ddp"]["sent_bytes"].values()) < 1000, "in shared memory"
    assert rows["PyTorch DDP"]["versions"] == {"torch": torch.__version__}
    assert formula_bytes("all-reduce") == {"worker": ALL_REDUCE_BYTES}
    assert formula_bytes("server") == {"worker": ALL_REDUCE_BYTES, "server": 2 * ALL_REDUCE_BYTES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, one in CONTENDERS.items() if one.environment] + ["labkit.horovod"]
)
def test_the_other_frameworks_agree(name):
    _, row = elsewhere.run_elsewhere([name], steps=4)["contenders"]
    if row["absent"]:
        pytest.skip(row["problem"])
    assert not row["problem"]
    assert row["agrees"], row["difference"]


def test_what_is_not_here_is_taken_from_the_stored_record_and_marked():
    right = {"worker": 0, "losses": [2.0, 1.0], "step_s": [0.1] * 2, "versions": {}}
    right |= {"sent_bytes": {"worker 0": [0] * 2}, "counted_bytes": {}}
    live = measure({ONE_DEVICE: Contender(lambda *_: right)}, 2, 1)
    both = elsewhere.side_by_side(live)
    stored = [row for row in both["contenders"] if row.get("recorded")]
    assert len(both["contenders"]) == len(stored) + 1
    assert "Horovod (recorded)" in str(elsewhere.elsewhere_table(both))
    with pytest.raises(ValueError, match="unknown contender"):
        elsewhere.run_elsewhere(["Caffe"])
