"""TensorFlow's strategies on the experiment, and the processes that one command starts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from agents import children_of
from torch.nn.functional import cross_entropy

from labkit.bench.elsewhere.digits import LR, MOMENTUM, SCRIPTS, initial_model, prepare
from labkit.bench.elsewhere.environments import python_of, why_not

STEPS = 8
PARAMETER_BYTES = 4 * sum(p.numel() for p in initial_model().parameters())
# What comes on top of tensors: gRPC, names of operations, images and labels.
OVERHEAD = 1.1
needs_tensorflow = pytest.mark.skipif(
    python_of("tensorflow") is None, reason=why_not("tensorflow") or "TensorFlow is here"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("elsewhere"), STEPS)


@pytest.fixture(scope="module")
def one_device(place):
    """The losses of PyTorch on the whole batches."""
    with np.load(place.experiment) as file:
        batches = list(zip(*(map(torch.from_numpy, file[n]) for n in ("images", "labels"))))
    model, losses = initial_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def command(place, script, *options):
    python = python_of("tensorflow")
    files = ["--experiment", place.experiment, "--report", place.folder / f"{script}.json"]
    return [python, place.script(script), *files, *options]


def report_of(place, script, *options):
    """Run a script, which prints nothing: the reports of its workers."""
    folder = place.folder / "home"
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command(place, script, *options),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": "", "HOME": str(folder), "TMPDIR": str(folder)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [*folder.iterdir()] == []  # neither settings nor temporary files
    found = {path: json.loads(path.read_text()) for path in place.folder.glob(f"{script}.json*")}
    return [report for _, report in sorted(found.items())]


def after_warm_up(report):
    return {name: each[2:] for name, each in report["sent_bytes"].items()}


@needs_tensorflow
@pytest.mark.slow
def test_mirrored_replicas_stay_equal_and_follow_one_device_without_a_socket(place, one_device):
    (report,) = report_of(place, "mirrored.py")
    assert report["losses"] == pytest.approx(one_device, abs=1e-5)
    first, second = report["weights_sha256"]
    assert first == second
    assert report["sent_bytes"] == {"worker 0": [0] * STEPS}
    assert len(report["step_s"]) == STEPS


@needs_tensorflow
@pytest.mark.slow
def test_both_workers_follow_one_device_and_send_what_a_ring_sends(place, one_device):
    reports = report_of(place, "multi_worker.py")
    assert [report["worker"] for report in reports] == [0, 1]
    (first,), (second,) = (report["weights_sha256"] for report in reports)
    assert first == second
    for report in reports:
        assert report["losses"] == pytest.approx(one_device, abs=1e-5)
        (sent,) = after_warm_up(report).values()
        # 2 (P - 1) / P of the gradients is all of them, for two workers.
        assert PARAMETER_BYTES < min(sent) <= max(sent) < OVERHEAD * PARAMETER_BYTES


@needs_tensorflow
@pytest.mark.slow
def test_a_parameter_server_in_lockstep_follows_one_device(place, one_device):
    (report,) = report_of(place, "parameter_server.py")
    assert report["losses"] == pytest.approx(one_device, abs=1e-5)
    sent = after_warm_up(report)
    assert set(sent) == {"coordinator", "server", "worker 0", "worker 1"}
    # Two workers, but TensorFlow decides who computes what.
    both = np.add(sent["worker 0"], sent["worker 1"])
    for each in (both, sent["server"]):
        assert 2 * PARAMETER_BYTES < each.min()
        assert each.max() < 2 * OVERHEAD * PARAMETER_BYTES


@needs_tensorflow
@pytest.mark.slow
def test_an_asynchronous_parameter_server_counts_its_staleness(place, one_device):
    (report,) = report_of(place, "parameter_server.py", "--asynchronous")
    updates = 2 * STEPS
    assert len(report["losses"]) == len(report["staleness"]) == updates
    assert all(0 <= stale < updates for stale in report["staleness"])
    # Each update can be in between only for those that had been read and were not yet applied:
    # with two workers, for one.
    assert sum(report["staleness"]) < updates
    # Both see the initial weights, on halves of the first batch.
    assert np.mean(report["losses"][:2]) == pytest.approx(one_device[0], abs=0.05)
    # What it read for each update, and what it was sent.
    (sent,) = report["sent_bytes"]["server"]
    assert updates * PARAMETER_BYTES < sent < OVERHEAD * updates * PARAMETER_BYTES


@needs_tensorflow
@pytest.mark.slow
def test_nothing_is_left_when_the_coordinator_is_killed_while_it_trains(place):
    long = prepare(place.folder / "long" if False else place.folder, STEPS)
    started = subprocess.Popen(command(long, "parameter_server.py"), env={**os.environ, "PYTHONPATH": ""})
    others = wait_for_children(started, 3)
    wait_until(lambda: all(map(listens, others)))
    started.kill()
    started.wait()
    wait_until(lambda: not any(map(is_alive, others)))
