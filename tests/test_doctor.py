"""The doctor: its findings are true of the machine, and only what the course needs is a stop."""

import multiprocessing
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labkit import doctor, workload
from labkit.doctor import CHECKS, WIDTH, Finding, examine, render
from labkit.errors import WorkerError
from labkit.gpus import Gpu, Gpus
from labkit.runtime import launch
from labkit.training.measured_link import MeasuredLink

GIB = 2**30


def finding_of(name: str) -> Finding:
    return examine(name, CHECKS[name])


@pytest.fixture
def gpus(monkeypatch):
    """Set the number of GPUs of this machine that can be used."""

    def pretend(count: int) -> None:
        found = Gpus(tuple(Gpu(index, "Some GPU", 80 * GIB) for index in range(count)))
        monkeypatch.setattr("labkit.gpus.found", lambda: found)
        monkeypatch.setattr(doctor, "num_gpus", lambda: count)
        monkeypatch.setattr("labkit.devices.num_gpus", lambda: count)

    return pretend


@pytest.fixture
def ranks(monkeypatch):
    """Replace labkit.run: the ranks return ``values``, or the run raises ``error``."""

    def pretend(values: list | None = None, error: Exception | None = None) -> None:
        def run(fn, *, world_size, timeout_s):
            if error is not None:
                raise error
            print("said by a rank")
            return SimpleNamespace(values=values)

        monkeypatch.setattr(launch, "run", run)

    monkeypatch.setattr("labkit.runtime.preload.warm_up", lambda **_: None)
    return pretend


# ---- the table


def test_a_check_that_raises_is_a_note_in_one_line():
    def check(name):
        raise OSError("first line\nsecond line\n\nand a traceback")

    found = examine("memory", check)
    assert (found.name, found.status) == ("memory", "note")
    assert found.found == "OSError: first line second line"
    assert found.advice


@pytest.mark.parametrize("advice", ["", "do this " * 40])
@pytest.mark.parametrize("found", ["short", "many words " * 30, "/a-path/of-one-word" * 20])
@pytest.mark.parametrize("name", ["GPUs", max(CHECKS, key=len)])
def test_every_line_fits_and_nothing_is_cut(name, found, advice):
    lines = render(Finding(name, "stop", found, advice)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith(name)
    assert lines[0][17:].startswith("  stop  ")
    assert sum("-> " in line for line in lines) == bool(advice)
    kept = "".join(lines).replace("->", "").replace(" ", "")
    assert kept == f"{name}stop{found}{advice}".replace(" ", "")


@pytest.mark.parametrize(
    ("statuses", "code"), [(["ok", "ok"], 0), (["ok", "note"], 0), (["stop", "note"], 1)]
)
def test_only_a_stop_makes_the_exit_code_1(statuses, code, monkeypatch, ranks, capsys):
    checks = {
        f"check {number}": lambda name, status=status: Finding(name, status, "this")
        for number, status in enumerate(statuses)
    }
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.main() == code
    assert ("First fix: check 0." in capsys.readouterr().out) == (code == 1)


def test_the_stop_key_ends_it_in_one_line(monkeypatch, ranks, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "CHECKS", {"cores": interrupted})
    assert doctor.main() == 130
    assert capsys.readouterr().err == "labkit: stopped\n"


def test_with_no_torch_every_line_still_comes(monkeypatch, ranks, capsys):
    ranks(error=ModuleNotFoundError("No module named 'torch'"))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line[:17].strip() for line in printed[:-2] if line[0] != " "] == list(CHECKS)
    assert printed[-1].endswith("First fix: torch loads, ranks talk.")


# ---- versions


def test_labkit_asks_for_every_package_that_is_checked():
    asked = " ".join(requires("labkit"))
    assert [name for name in doctor.PACKAGES if f"{name}>=" not in asked] == []


@pytest.mark.parametrize("name", doctor.PACKAGES)
def test_an_old_version_is_a_note_with_the_range(name, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: "0.0.1")
    found = finding_of(name)
    assert found.status == "note"
    assert found.found.startswith("0.0.1, but labkit is made for >=")
    assert "requirements.txt" in found.advice


@pytest.mark.parametrize("number", ["99.1", "99.0a1+local.build"])
def test_a_newer_version_is_fine(number, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: number)
    assert finding_of("torch").status == "ok"


@pytest.mark.parametrize(("name", "status"), [("torch", "stop"), ("nbval", "note")])
def test_a_missing_package_stops_only_if_every_page_needs_it(name, status, monkeypatch):
    def absent(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", absent)
    found = finding_of(name)
    assert found.status == status
    assert found.found.startswith("not installed")
    assert "requirements.txt" in found.advice


def test_an_old_python_stops(monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.4")
    found = finding_of("Python")
    assert (found.status, found.found) == ("stop", "3.10.4, but labkit needs >=3.11")


def test_torchvision_of_another_build_is_named_with_the_way_to_mend_it(monkeypatch):
    def refuse(library):
        raise OSError(f"{library}: undefined symbol")

    monkeypatch.setattr("torch.ops.load_library", refuse)
    found = finding_of("torchvision loads")
    assert found.status == "note"
    assert "undefined symbol" in found.found
    assert "--force-reinstall -c requirements.txt torch torchvision" in found.advice


# ---- GPUs (more in test_gpu_checks.py) and backends


@pytest.mark.parametrize(
    ("count", "status", "text"), [(0, "note", "none"), (2, "ok", "2 x Some GPU, 80 GiB")]
)
def test_gpus_are_counted_by_kind_and_none_is_a_note(count, status, text, gpus):
    gpus(count)
    found = finding_of("GPUs")
    assert (found.status, found.found) == (status, text)
    assert ("the whole course runs on CPU" in found.advice) == (count == 0)


def test_a_torch_without_gloo_stops(monkeypatch):
    assert finding_of("gloo").status == "ok"
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert finding_of("gloo").status == "stop"


# ---- the machine


@pytest.mark.parametrize(("cores", "status"), [(1, "note"), (2, "ok")])
def test_one_core_is_a_note(cores, status, monkeypatch):
    monkeypatch.setattr(doctor, "num_cores", lambda: cores)
    assert finding_of("cores").status == status


@pytest.mark.parametrize(
    ("available_bytes", "status", "advice"),
    [
        (8 * GIB, "ok", ""),
        (3 * GIB, "note", "world sizes up to 3"),
        (GIB // 2, "note", "world sizes up to 2"),
    ],
)
def test_little_memory_means_smaller_world_sizes(
    available_bytes, status, advice, tmp_path, monkeypatch
):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {2**24} kB\nMemAvailable: {available_bytes // 1024} kB\n")
    monkeypatch.setattr(doctor, "MEMINFO", meminfo)
    monkeypatch.setattr(doctor, "CONTAINER_MEMORY", tmp_path / "absent")
    found = finding_of("memory")
    assert found.status == status
    assert advice in found.advice


def test_memory_is_read_from_the_systems_own_file(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  3072 kB\nMemFree: 1 kB\nMemAvailable:  2048 kB\nHuge: 0\n")
    monkeypatch.setattr(doctor, "MEMINFO", meminfo)
    assert finding_of("memory").found == "2 MiB of 3 MiB available"
    (tmp_path / "limit").write_text("1048576\n")
    monkeypatch.setattr(doctor, "CONTAINER_MEMORY", tmp_path / "limit")
    assert finding_of("memory").found == "1 MiB of 1 MiB available"
    monkeypatch.setattr(doctor, "MEMINFO", tmp_path / "absent")
    assert finding_of("memory").status == "ok"


@pytest.mark.parametrize(
    ("total_mib", "free_mib", "status"),
    [(64, 64, "note"), (8192, 100, "note"), (8192, 8000, "ok")],
)
def test_a_small_or_full_shm_is_a_note_with_the_way_round(
    total_mib, free_mib, status, tmp_path, monkeypatch
):
    usage = SimpleNamespace(total=total_mib * 2**20, free=free_mib * 2**20)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor, "SHM", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found = finding_of("/dev/shm")
    assert found.status == status
    assert ("docker run --shm-size" in found.advice) == (status == "note")


def test_a_missing_shm_matters_on_linux_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "SHM", tmp_path / "absent")
    monkeypatch.setattr(sys, "platform", "linux")
    assert (finding_of("/dev/shm").status, finding_of("/dev/shm").found) == ("note", "missing")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert finding_of("/dev/shm").status == "ok"


def test_a_system_without_forkserver_is_a_note(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert finding_of("start method").status == "note"


def test_a_temporary_folder_that_takes_no_files_stops(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    assert finding_of("temporary folder").status == "ok"
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    found = finding_of("temporary folder")
    assert (found.status, "TMPDIR" in found.advice) == ("stop", True)
    assert "No space left" in found.found


# ---- the course


def test_whole_digits_are_counted():
    found = finding_of("digits")
    assert found == Finding("digits", "ok", "intact: 1,437 images to train on, 360 held out")


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"")]
)
def test_broken_digits_stop_with_the_file_and_how_to_restore_it(damage, tmp_path, monkeypatch):
    shutil.copytree(Path(__file__).parents[1] / "data" / "digits", tmp_path / "digits")
    damage(tmp_path / "digits" / "t10k-labels-idx1-ubyte")
    monkeypatch.setattr(workload.datasets, "REPOSITORY_DATA", tmp_path)
    found = finding_of("digits")
    assert found.status == "stop"
    assert "t10k-labels-idx1-ubyte" in found.advice
    assert "git checkout -- data/digits" in found.advice


def test_notebooks_are_counted_or_a_note_says_where_to_run(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_start_here.ipynb").touch()
    monkeypatch.chdir(tmp_path)
    assert finding_of("notebooks").found.startswith("1 in ")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert finding_of("notebooks").found.endswith("/notebooks")
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "elsewhere" / "labkit" / "doctor.py"))
    found = finding_of("notebooks")
    assert found.status == "note"
    assert "run this from a clone" in found.advice


ON_CPU = "shared memory" if sys.platform.startswith("linux") else "gloo"


@pytest.mark.parametrize(
    ("here", "way"),
    [
        (0, f"cpu, over {ON_CPU}"),
        (1, "cuda:0, over gloo"),
        (2, "cuda:0 and cuda:1, over nccl"),
    ],
)
def test_ranks_that_swap_their_numbers_can_talk(ranks, gpus, capsys, here, way):
    gpus(here)
    ranks(values=[1.0, 0.0])
    found = finding_of("ranks talk")
    assert found.status == "ok"
    assert found.found.startswith(f"2 ranks on {way}, in ")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (
            {
                "error": WorkerError(
                    "rank 1 raised OSError: refused\n  at a line\n\nTraceback: ..."
                )
            },
            "WorkerError: rank 1 raised OSError: refused at a line",
        ),
        ({"values": [0.0, 0.0]}, "received [0.0, 0.0], not [1.0, 0.0]"),
    ],
)
def test_ranks_that_cannot_talk_stop_with_the_reason_in_one_line(outcome, reason, ranks):
    ranks(**outcome)
    found = finding_of("ranks talk")
    assert found.status == "stop"
    assert reason in found.found
    assert "\n" not in found.found
    assert "127.0.0.1" in found.advice


@pytest.fixture
def measured(monkeypatch):
    """Replace measure_link; the ways in ``broken`` fail."""

    def pretend(*broken):
        asked = []

        def measure_link(world_size, *, sizes_bytes, repeats, **settings):
            asked.append(settings)
            if settings.get("transport") in broken:
                raise WorkerError("rank 1 raised RuntimeError: no way\n\nTraceback: ...")
            moved = {"auto": "NCCL", "nccl": "NCCL", "shared": "CUDA IPC", "gloo": "gloo"}
            return MeasuredLink(
                alpha_s=5e-5,
                beta_s_per_byte=2e-10,
                pattern="ping_pong",
                world_size=2,
                transport=moved.get(settings.get("transport"), "shared memory"),
                seconds={},
                added_s=[],
            )

        def chosen(ranks, device="auto", transport="auto", devices=None):
            gpus = min(ranks, doctor.num_gpus())
            named = devices.split(",") if devices else [f"cuda:{i}" for i in range(gpus)]
            return SimpleNamespace(devices=["cpu"] * ranks if device == "cpu" else named)

        monkeypatch.setattr(doctor, "plan", chosen)
        monkeypatch.setattr("labkit.training.measured_link.measure_link", measure_link)
        return asked

    return pretend


def test_every_way_between_ranks_is_measured(gpus, measured):
    gpus(0)
    asked = measured()
    found = finding_of("rank to rank")
    assert asked == [{"device": "cpu"}]
    assert found.found == "shared memory on cpu: 50 µs per message, 5 GB/s"
    gpus(1)
    asked = measured()
    rows = finding_of("rank to rank").picture.splitlines()
    assert [row.partition(":")[0] for row in rows[:1]] == ["shared memory on cpu"]
    assert rows[1] == "gloo on cuda:0, both ranks: 50 µs per message, 5 GB/s"
    assert asked[-1] == {"devices": "cuda:0,cuda:0", "transport": "nccl"}
    gpus(2)
    measured()
    found = finding_of("rank to rank")
    assert (found.status, found.advice) == ("ok", "")
    rows = found.picture.splitlines()
    assert rows[1].startswith("NCCL on cuda:0 and cuda:1: 50 µs per message")
    assert rows[4].startswith("NCCL on cuda:0, both ranks: 50 µs")


def test_a_way_that_fails_is_a_note_beside_the_others(gpus, measured):
    gpus(2)
    measured("shared")
    found = finding_of("rank to rank")
    assert found.status == "note"
    assert found.picture.count("5 GB/s") == 4
    assert "CUDA IPC: does not work: WorkerError: rank 1 raised RuntimeError" in found.picture
    assert "transport=" in found.advice


def test_one_rank_per_gpu_is_what_nccl_is_expected_to_take(gpus, measured):
    gpus(2)
    measured("nccl")
    found = finding_of("rank to rank")
    assert (found.status, found.advice) == ("ok", "")
    assert "both ranks on one GPU: does not work: " in found.picture


@pytest.mark.fresh
def test_doctor_for_real_on_this_machine():
    command = [sys.executable, "-m", "labkit", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert [line[:17].strip() for line in lines[:-2] if line[0] != " "] == list(CHECKS)
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1] == "The course runs on this machine."
    assert [line[19:23] for line in lines if line.startswith("ranks talk")] == ["ok  "]
