"""The doctor: its findings are true of the machine, and only what the course needs is a stop."""

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import warm_python

from labkit.training import doctor
from labkit.training.doctor import CHECKS
from labkit.workload import datasets


def raises(error):
    def check(*args, **options):
        raise error

    return check


def test_what_is_missing_or_broken_is_said_line_by_line(tmp_path, monkeypatch, capsys):
    shutil.copytree(datasets.PACKAGE_DATA / "digits", tmp_path / "digits")
    (tmp_path / "digits" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    monkeypatch.setattr(datasets, "PACKAGE_DATA", tmp_path)
    monkeypatch.setattr(doctor, "version", raises(PackageNotFoundError("nbval")))
    monkeypatch.setattr("labkit.training.measured.measure_link", raises(OSError("no\nway")))
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *words: f"printed {' '.join(words)}\n")
    usage = SimpleNamespace(total=8192 * 2**20, free=100 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    for words in (
        *("nbval", "t10k-labels-idx1-ubyte", "`git checkout -- labkit/workload/data/digits`"),
        *("docker run --shm-size", "printed topo -m\n", "OSError: no way\n"),
        *("make env TORCH=auto", "First fix: digits, ranks talk."),
    ):
        assert words in printed
    heads = [line[:13].strip() for line in printed.splitlines() if line[:13].strip() in CHECKS]
    assert heads == list(CHECKS)


@pytest.mark.fresh
def test_doctor_for_real_on_this_machine():
    command = [warm_python.command(), "-m", "labkit", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert [line[:13].strip() for line in lines[:-2]] == list(CHECKS)
    assert lines[-1] == "The course runs on this machine."
    assert "intact: 1,437 images to train on, 360 held out" in done.stdout
