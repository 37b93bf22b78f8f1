"""The doctor: its findings are true of the machine, and only what the course needs is a stop."""

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labkit import doctor, workload
from labkit.doctor import CHECKS, WIDTH, examine
from labkit.errors import WorkerError
from labkit.runtime import launch


def raises(error):
    def check(*args, **options):
        raise error

    return check


@pytest.mark.parametrize("name", ["GPUs", max(CHECKS, key=len)])
@pytest.mark.parametrize("found", ["short", "many words " * 30, "/a-path/of-one-word" * 20])
def test_every_line_fits_and_nothing_is_cut(name, found, monkeypatch):
    monkeypatch.setitem(CHECKS, name, lambda: (found, "do this " * 40))
    status, text = examine(name)
    assert max(map(len, text.splitlines())) <= WIDTH
    kept = "".join(text.split()).replace("->", "")
    assert kept == "".join(f"{name}{status}{found}{'do this ' * 40}".split())


@pytest.mark.parametrize(("name", "code"), [("cores", 0), ("ranks talk", 1)])
def test_only_what_the_course_needs_makes_the_exit_code_1(name, code, monkeypatch, capsys):
    error = OSError("first line\nsecond line\n\nand a traceback")
    monkeypatch.setattr(doctor, "CHECKS", {name: raises(error)})
    assert doctor.main() == code
    printed = capsys.readouterr().out
    assert "OSError: first line second line\n" in printed
    assert (f"First fix: {name}." in printed) == (code == 1)


def test_the_stop_key_ends_it_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"cores": raises(KeyboardInterrupt())})
    assert doctor.main() == 130
    assert capsys.readouterr().err == "labkit: stopped\n"


def test_with_no_torch_every_line_still_comes(monkeypatch, capsys):
    monkeypatch.setattr(launch, "run", raises(ModuleNotFoundError("No module named 'torch'")))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line[:13].strip() for line in printed[:-2] if line[0] != " "] == list(CHECKS)
    assert "First fix: torch, " in printed[-1]


def test_labkit_asks_for_every_package_that_is_checked():
    asked = " ".join(requires("labkit"))
    assert [name for name in doctor.PACKAGES if f"{name}>=" not in asked] == []


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(doctor, "version", raises(PackageNotFoundError()))
    status, text = examine("packages")
    assert status == "note"
    assert "nbval is not installed" in " ".join(text.split())
    assert "requirements.txt" in text


def test_what_nvidia_smi_prints_is_shown_as_it_is(monkeypatch):
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *words: f"printed {' '.join(words)}")
    for count, status in ((0, "note"), (2, "ok")):
        monkeypatch.setattr(doctor, "num_gpus", lambda count=count: count)
        found, text = examine("GPUs")
        assert (found, text.splitlines()[-1]) == (status, "printed topo -m")


@pytest.mark.parametrize(("free_mib", "status"), [(100, "note"), (8000, "ok")])
@pytest.mark.skipif(sys.platform != "linux", reason="used on Linux alone")
def test_a_full_shm_is_a_note_with_the_way_round(free_mib, status, monkeypatch):
    usage = SimpleNamespace(total=8192 * 2**20, free=free_mib * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found, text = examine("/dev/shm")
    assert (found, "docker run --shm-size" in text) == (status, status == "note")


def test_broken_digits_stop_with_the_file_and_how_to_restore_it(tmp_path, monkeypatch):
    assert examine("digits")[1].endswith("intact: 1,437 images to train on, 360 held out")
    shutil.copytree(Path(__file__).parents[1] / "data" / "digits", tmp_path / "digits")
    (tmp_path / "digits" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    monkeypatch.setattr(workload.datasets, "REPOSITORY_DATA", tmp_path)
    status, text = examine("digits")
    assert status == "stop"
    assert "t10k-labels-idx1-ubyte" in "".join(text.split())
    assert "`git checkout -- data/digits`" in " ".join(text.split())


def test_ranks_that_cannot_talk_stop_with_the_reason_in_one_line(monkeypatch):
    error = WorkerError("rank 1 raised OSError: refused\n  at a line\n\nTraceback: ...")
    monkeypatch.setattr(launch, "run", raises(error))
    status, text = examine("ranks talk")
    assert status == "stop"
    assert "WorkerError: rank 1 raised OSError: refused at a line\n" in text
    monkeypatch.setattr(launch, "run", lambda *_, **__: SimpleNamespace(values=[0.0, 0.0]))
    assert "received [0.0, 0.0], not [1.0, 0.0]" in examine("ranks talk")[1]


def test_every_way_between_ranks_is_measured(monkeypatch):
    asked = []

    def measure_link(world_size, *, device, transport, **_):
        asked.append((device, transport))
        raise WorkerError("no way\n\nTraceback: ...")

    monkeypatch.setattr("labkit.training.measured.measure_link", measure_link)
    monkeypatch.setattr(doctor, "num_gpus", lambda: 2)
    monkeypatch.setattr("labkit.devices.num_gpus", lambda: 2)
    status, text = examine("rank to rank")
    assert status == "note"
    assert asked == [("cpu", "auto"), ("cuda", "auto"), ("cuda", "gloo")]
    assert "gloo on cuda:0 and cuda:1 does not work: WorkerError: no way" in text


def test_a_torch_without_gloo_stops(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert examine("torch")[0] == "stop"


@pytest.mark.fresh
def test_doctor_for_real_on_this_machine():
    command = [sys.executable, "-m", "labkit", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert [line[:13].strip() for line in lines[:-2] if line[0] != " "] == list(CHECKS)
    assert lines[-1] == "The course runs on this machine."
    assert [line[15:19] for line in lines if line.startswith("ranks talk")] == ["ok  "]
