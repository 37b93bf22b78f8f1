"""Horovod itself, as ``make horovod`` compiles it, trains the experiment as one device does."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from workbook.measure.elsewhere import turns
from workbook.measure.elsewhere.environments import python_of, why_not

STEPS, WORKERS = 4, 2
MARK = "LABKIT_TEST_OF_HOROVOD"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not("horovod")), reason=why_not("horovod") or "is there"),
]


def losses_of_one_device(place: Path) -> list[float]:
    """PyTorch on whole batches, without any code of labkit or of the scripts' steps."""
    experiment = turns.module_of(place).Experiment.load(place / "experiment.npz")
    model, losses = turns.initial_model(), []
    rates = {"lr": experiment.lr, "momentum": experiment.momentum}
    optimizer = torch.optim.SGD(model.parameters(), **rates)
    for images, labels in zip(experiment.images, experiment.labels):
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def started_by(mark: str) -> list[str]:
    """Processes that were started with this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
        except OSError:
            continue  # it has ended
        found += [path.parent.name] if mark.encode() in text else []
    return found


def horovodrun(place: Path, home: Path) -> None:
    """Two workers run the script; ``home`` gets what they write elsewhere, and a note of ssh."""
    python = python_of("horovod")
    for name in ("home", "tmp", "bin"):
        (home / name).mkdir(parents=True)
    (home / "bin" / "ssh").write_text(f"#!/bin/sh\ntouch {home}/home/ssh_was_called; exit 1\n")
    (home / "bin" / "ssh").chmod(0o755)
    words = [python.with_name("horovodrun"), "--gloo", "--disable-cache", "-np", str(WORKERS)]
    words += [python, place / "horovod_digits.py", "--experiment", place / "experiment.npz"]
    words += ["--report", place / "report.json"]
    changed = {"HOME": str(home / "home"), "TMPDIR": str(home / "tmp"), MARK: str(home)}
    changed |= {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    settings = {**os.environ, **changed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, words)], env=settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout, done.stderr) == ("", "")


def test_losses_of_one_device_bytes_of_a_ring_and_nothing_left(tmp_path):
    place = tmp_path
    turns.prepare(place, STEPS)
    due = losses_of_one_device(place)
    home = tmp_path / "elsewhere"
    horovodrun(place, home)
    assert [*(home / "home").iterdir(), *(home / "tmp").iterdir()] == []
    assert not started_by(f"{MARK}={home}")
    paths = [tmp_path / "report.json", *sorted(tmp_path.glob("report.json.*"))]
    told = [json.loads(path.read_text()) for path in paths]
    assert len(told) == WORKERS
    num_bytes = sum(p.numel() * p.element_size() for p in turns.initial_model().parameters())
    ring = 2 * (WORKERS - 1) / WORKERS * num_bytes
    for worker in told:
        assert worker["losses"] == pytest.approx(due, rel=1e-5)
        assert worker["losses"] == told[0]["losses"]
        for sent in worker["sent_bytes"].values():
            # What is more than the ring's is the negotiation, which goes on as long as a step.
            assert len(sent) == STEPS
            assert all(ring <= one < 1.5 * ring for one in sent), (sent, ring)
