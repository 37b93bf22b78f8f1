"""Which GPUs count, tried by a real process on a PyTorch in place of the real one."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import is_alive, wait_until

import labkit
from labkit import gpus
from labkit.gpus import Gpu, Gpus

# A PyTorch with the part that the trying process uses; GPU k behaves as word k of HOW says.
FAKE = """
import os, sys, time, types

if sys.argv[1].isdigit():
    print('{"a": 1}', {"index": 0})  # as a sitecustomize might
HOW = os.environ["HOW"].split(",") if os.environ["HOW"] else []
open(os.environ["HOW_LOG"], "a").write(f"{os.getpid()} {sys.argv[1]}\\n")
time.sleep(float(os.environ.get("HOW_SLOW", 0)))
ERRORS = {
    "old_driver": "The NVIDIA driver on your system is too old (found version 11040). Update it",
    "old_card": "CUDA error: no kernel image is available for execution on the device\\nMore",
    "busy": "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "full": "CUDA out of memory. Tried to allocate 2.00 MiB",
    "new": "CUDA error: something of the future",
}

def properties(index):
    if HOW[index] == "old_driver":
        raise RuntimeError(ERRORS["old_driver"])
    return types.SimpleNamespace(name=f"GPU {index}", total_memory=8, major=6, minor=1)

class Ones:
    def __init__(self, size, device):
        self.how = HOW[int(device.partition(":")[2])]
    def __mul__(self, other):
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "crashes":
            print("driver: Bus error", file=sys.stderr, flush=True)
            os.abort()
        if self.how in ERRORS:
            raise RuntimeError(ERRORS[self.how])
        return self
    def sum(self):
        return self
    def item(self):
        return 3 if self.how == "wrong" else 4

def init():
    if HOW:
        return
    raise RuntimeError("No CUDA GPUs are available")

ones = Ones
__version__ = "0"
version = types.SimpleNamespace(cuda="13.0")
cuda = types.SimpleNamespace(
    device_count=lambda: len(HOW), get_arch_list=lambda: ["sm_75", "sm_90"],
    get_device_properties=properties, init=init)
"""


@pytest.fixture
def machine(monkeypatch, tmp_path, request):
    """Let this process find a driver, and the trying process the GPUs that it is told of."""
    (tmp_path / "torch.py").write_text(FAKE)
    log = tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOW_LOG", str(log))
    monkeypatch.setattr(gpus, "may_exist", lambda: True)
    monkeypatch.setattr(gpus, "_PATIENCE_S", 2.0 if "hangs" in request.node.name else 20.0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    def pretend(how, **variables):
        for name, value in ({"HOW": how} | variables).items():
            monkeypatch.setenv(name, value)
        gpus._path().unlink(missing_ok=True)
        gpus._found.cache_clear()
        return gpus.found()

    pretend.trials = lambda: [line.split()[1] for line in log.read_text().splitlines()]
    pretend.pids = lambda: [int(line.split()[0]) for line in log.read_text().splitlines()]
    yield pretend
    gpus._path().unlink(missing_ok=True)
    gpus._found.cache_clear()


def usable(*indices):
    return tuple(Gpu(index, f"GPU {index}", 8, (6, 1)) for index in indices)


@pytest.mark.skipif(os.environ.get("LABKIT_TEST_GPUS") == "1", reason="this run is for GPUs")
def test_no_test_and_no_notebook_under_test_sees_a_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1", "the kernels of notebooks inherit it"
    assert torch.cuda.device_count() == 0
    makefile = (Path(labkit.__file__).parents[1] / "Makefile").read_text().replace("\\\n", "")
    # Without a folder of tests, their conftest.py is not read.
    alone = [line for line in makefile.splitlines() if "$(NBVAL) $(NOTEBOOKS)" in line]
    assert alone
    assert all("$(HIDE_GPUS)" in line or "LABKIT_PRETEND_GPUS=" in line for line in alone)


def test_all_that_compute_count_and_are_tried_by_one_process(machine):
    assert machine("ok,ok,ok") == Gpus(usable(0, 1, 2))
    gpus.found()
    assert machine.trials() == ["0"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "old_card",
            r"architecture sm_61 is not .* built for \(sm_75, sm_90\): install a PyTorch",
        ),
        ("busy", r"another program holds it .*exclusive.*wait until .* CUDA_VISIBLE_DEVICES$"),
        ("full", "other programs have taken its memory .nvidia-smi shows them.: wait until"),
        ("new", "RuntimeError: CUDA error: something of the future$"),
        ("wrong", "computes wrong results"),
        ("crashes", "has ended: driver: Bus error$"),
        ("hangs", "nothing has come back within 2 s: the driver hangs .*: restart the machine"),
    ],
)
def test_a_gpu_in_the_middle_that_cannot_be_used_is_left_out_and_the_next_step_is_said(
    machine, how, told
):
    seen = machine(f"ok,{how},ok")
    assert seen.usable == usable(0, 2)
    assert seen.why_not.startswith("cuda:1 cannot be used: ")
    assert re.search(told, seen.why_not), seen.why_not
    assert "\n" not in seen.why_not


def test_a_driver_that_is_too_old_is_named_with_both_versions_once_for_all_gpus(machine):
    seen = machine("old_driver,old_driver")
    assert not seen.usable
    assert seen.why_not.count("too old") == 1
    assert seen.why_not.startswith("cuda:0, cuda:1 cannot be used: the driver (for CUDA 11.4) is")
    assert "CUDA 13.0: update the driver, or install" in seen.why_not


def test_a_driver_without_gpus_and_a_pytorch_that_cannot_be_imported(machine):
    assert machine("", CUDA_VISIBLE_DEVICES="7") == Gpus(
        why_not="there is a driver, and no GPU: the driver shows none to this process "
        "(CUDA_VISIBLE_DEVICES is 7; nvidia-smi lists those of the machine)"
    )
    (Path(os.environ["PYTHONPATH"]) / "torch.py").write_text("import nothing_of_this_name")
    why = machine("ok").why_not
    assert why.startswith("no GPU is used, since the process that tried it has ended: ModuleNotF")


def test_where_no_process_can_be_started_there_is_a_reason_and_no_error(machine, monkeypatch):
    for name, value in (("executable", ""), ("executable", "/no/python")):
        monkeypatch.setattr(sys, name, value)
        assert "the process that tries them cannot be started" in machine("ok").why_not


def test_a_process_that_hangs_before_its_first_gpu_is_ended_and_told(machine, monkeypatch):
    monkeypatch.setattr(gpus, "_PATIENCE_S", 0.5)
    assert "no GPU is used, since nothing has come back" in machine("ok", HOW_SLOW="60").why_not
    (pid,) = machine.pids()
    assert wait_until(lambda: not is_alive(pid), 5)


def test_what_is_left_when_the_time_for_all_is_over_does_not_count(machine, monkeypatch):
    monkeypatch.setattr(gpus, "_PATIENCE_FOR_ALL_S", 2.0)
    seen = machine("ok,hangs,ok,ok")
    assert seen.usable == usable(0)
    assert "cuda:2, cuda:3 cannot be used: it was not tried within" in seen.why_not


def test_a_pytorch_without_cuda_on_a_machine_with_a_driver_says_which_to_install(
    machine, monkeypatch
):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    seen = machine("ok")
    assert not seen.usable
    assert "is built without CUDA: install a PyTorch that fits (make env TORCH=" in seen.why_not


def test_where_there_is_no_driver_no_process_is_started(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(gpus.subprocess, "Popen", refuse)
    monkeypatch.setattr(gpus, "_DRIVERS", ())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    gpus._found.cache_clear()
    assert gpus.found() == Gpus()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("visible", "may"),
    [(None, True), ("0,1", True), (" 2", True), ("GPU-8c5", True), ("MIG-8c5", True)]
    + [(hidden, False) for hidden in ("", " ", "-1", " -1 ", "-1,0", "NoDevFiles", "none")],
)
def test_hidden_gpus_are_not_asked_for(monkeypatch, tmp_path, visible, may):
    monkeypatch.setattr(gpus, "_DRIVERS", (str(tmp_path),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.may_exist() is may


def test_another_choice_of_visible_gpus_is_tried_anew(machine, monkeypatch):
    machine("ok,ok")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("HOW", "ok")
    assert gpus.found() == Gpus(usable(0))
    assert machine.trials() == ["0", "0"]


ASK = """
import sys
sys.path[:0] = [{root!r}]
from types import SimpleNamespace as Space
import torch
torch.backends = Space(cuda=Space(is_built=lambda: True))
from labkit import gpus
gpus.may_exist = lambda: True
print("ready", flush=True)
input()
print(len(gpus.found().usable), flush=True)
input()
"""


def test_eight_processes_that_ask_at_once_share_one_trial(machine, monkeypatch):
    root = str(Path(labkit.__file__).parents[1])
    monkeypatch.setenv("HOW", "ok,ok,busy")
    command = [sys.executable, "-c", ASK.format(root=root), "asks"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    asking = [subprocess.Popen(command, **pipes) for _ in range(8)]
    # They begin together, and end once all of them have their answer.
    for told in ("ready\n", "2\n"):
        assert [process.stdout.readline() for process in asking] == [told] * 8
        for process in asking:
            process.stdin.write("\n")
    assert [process.wait(20) for process in asking] == [0] * 8
    assert machine.trials().count("0") == 1
    assert not gpus._path().exists(), "the file must not outlive those that shared it"


def test_a_result_is_not_kept_for_a_process_that_asks_later(machine, monkeypatch):
    monkeypatch.setattr(gpus, "_SHARED_S", 0.0)
    machine("busy")
    gpus._found.cache_clear()
    monkeypatch.setenv("HOW", "ok")
    assert gpus.found() == Gpus(usable(0))


def test_ranks_of_one_torchrun_agree_however_late_they_ask(machine, monkeypatch):
    monkeypatch.setattr(gpus, "_SHARED_S", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    machine("ok,ok")
    gpus._found.cache_clear()
    monkeypatch.setenv("HOW", "ok,busy")
    assert gpus.found() == Gpus(usable(0, 1))


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"at_s": "x", "key": []}', "\0" * 9])
def test_a_file_that_holds_something_else_is_not_believed(machine, content):
    machine("ok")
    gpus._path().write_text(content)
    gpus._found.cache_clear()
    assert gpus.found() == Gpus(usable(0))


def test_a_link_in_the_place_of_the_file_is_not_followed(machine, tmp_path):
    target = tmp_path / "precious"
    target.write_text("as it was")
    for make in (os.symlink, os.link):
        gpus._path().unlink(missing_ok=True)
        make(target, gpus._path())
        gpus._found.cache_clear()
        os.environ["HOW"] = "ok"
        assert gpus.found() == Gpus(usable(0))
    assert target.read_text() == "as it was"


def test_threads_that_ask_at_once_share_one_trial_too(machine, monkeypatch):
    monkeypatch.setenv("HOW", "ok")
    with ThreadPoolExecutor(4) as pool:
        assert {len(seen.usable) for seen in pool.map(lambda _: gpus.found(), range(4))} == {1}
    assert machine.trials() == ["0"]
