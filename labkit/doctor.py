"""``python -m labkit doctor``: what this machine has, and what to do if something is missing.

A check takes its name in the table and returns a Finding; an exception becomes a finding, too.
Packages that may be absent or broken are imported inside their checks, so that the doctor also
runs where the installation is broken.
"""

import contextlib
import io
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labkit.devices import hardware, num_cores, plan
from labkit.gpus import num_gpus, nvidia_smi
from labkit.units import format_bytes, format_count, format_seconds

WIDTH = 99
ENOUGH_MEMORY_BYTES = 4 * 2**30
ENOUGH_SHM_BYTES = 512 * 2**20
RANKS_TIMEOUT_S = 60
LINK_BYTES = (2**12, 2**22)
SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
# What a container may use; the file is absent, or says "max", where there is no limit.
CONTAINER_MEMORY = Path("/sys/fs/cgroup/memory.max")
# For each package, the status if it is absent, and what needs it.
PACKAGES = {
    "torch": ("stop", "everything runs on it"),
    "torchvision": ("note", "for ResNet-18, VGG16, MobileNetV2 and the data sets to download"),
    "matplotlib": ("stop", "every page draws with it"),
    "jupyterlab": ("note", "make lab opens the pages in it; another notebook editor works, too"),
    "ipywidgets": ("note", "the sliders need it; the figures beside them do not"),
    "nbval": ("note", "make test runs the notebooks with it"),
}
_INSTALL = "in the workbook's folder: python -m pip install -r requirements.txt -e ."
_REINSTALL = (
    "torch and torchvision must be a pair, both CUDA builds or both CPU builds; in the workbook's "
    "folder: python -m pip install --force-reinstall -c requirements.txt torch torchvision"
)
_TMPDIR = "free some space, or set TMPDIR to a folder that you may write to"
_RANKS_ADVICE = (
    "first fix what is above. Ranks talk over 127.0.0.1: a firewall or a sandbox may forbid "
    "it. If the path is too long, set TMPDIR=/tmp; if the GPUs are at fault, set "
    "CUDA_VISIBLE_DEVICES=-1 to work without them. This prints the whole error: "
    "python -m labkit train --strategy ring_all_reduce --world-size 2"
)
# The status and the advice if a check raises; a check that is not listed gives a note.
_IF_RAISED = {
    "torch loads": ("stop", _REINSTALL),
    "torchvision loads": ("note", _REINSTALL),
    "temporary folder": ("stop", _TMPDIR),
    "ranks talk": ("stop", _RANKS_ADVICE),
}


@dataclass(frozen=True)
class Finding:
    """The result of the check ``name``, with advice if something should be changed.

    The status is ``ok``, ``note`` (the course runs, with a limit), or ``stop`` (it does not).
    ``printed`` is shown below as it is.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    printed: str = ""


def main() -> int:
    """Print each finding as it is made; return 1 if something stops the course, else 0."""
    with contextlib.suppress(Exception):  # what fails here fails again in check_ranks
        from labkit.runtime.preload import warm_up

        # The process that ranks are forked from imports torch while the checks run here.
        warm_up(training=False)
    stops = []
    try:
        for name, check in CHECKS.items():
            finding = examine(name, check)
            print(render(finding), flush=True)
            stops += [name] if finding.status == "stop" else []
    except KeyboardInterrupt:
        print("labkit: stopped", file=sys.stderr)
        return 130
    if stops:
        print(f"\nThe course does not run here yet. First fix: {', '.join(stops)}.")
    else:
        print("\nThe course runs on this machine.")
    return 1 if stops else 0


def examine(name: str, check: Callable[[str], Finding]) -> Finding:
    """Run a check; an exception inside it is a finding as well."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return check(name)
    except Exception as error:
        broken = f"could not be checked; if the installation is at fault, {_INSTALL}"
        status, advice = _IF_RAISED.get(name, ("note", broken))
        return Finding(name, status, _one_line(error), advice)


def render(finding: Finding) -> str:
    """The finding and its advice, both wrapped at WIDTH in one column, and what was printed."""
    head = f"{finding.name:<17}  {finding.status:<4}  "
    rows = [(head, finding.found), (" " * (len(head) - 3) + "-> ", finding.advice)]
    wrapped = [
        textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(head))
        for start, text in rows
        if text
    ]
    return "\n".join(wrapped + finding.printed.splitlines())


def check_labkit(name: str) -> Finding:
    return Finding(name, "ok", f"{version('labkit')} in {Path(__file__).parent}")


def check_python(name: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    found, wanted = platform.python_version(), metadata("labkit")["Requires-Python"]
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding(name, "ok", f"{found} ({wanted}) at {sys.executable}")
    advice = "set up with a newer one: make distclean, then make env PYTHON=python3.12"
    return Finding(name, "stop", f"{found}, but labkit needs {wanted}", advice)


def check_package(name: str) -> Finding:
    from packaging.requirements import Requirement

    status, need = PACKAGES[name]
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, status, f"not installed ({need})", _INSTALL)
    needed = map(Requirement, requires("labkit") or ())
    ranges = {requirement.name: requirement.specifier for requirement in needed}
    if ranges[name].contains(found, prereleases=True):
        return Finding(name, "ok", f"{found} ({ranges[name]})")
    # Never a stop: packages are also loaded below, and a vendor's version may be unusual.
    return Finding(name, "note", f"{found}, but labkit is made for {ranges[name]}", _INSTALL)


def check_torch_loads(name: str) -> Finding:
    import torch

    cuda = torch.version.cuda
    return Finding(name, "ok", f"built for CUDA {cuda}" if cuda else "built without CUDA")


def check_torchvision_loads(name: str) -> Finding:
    import torch

    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torchvision'")
    # Only its compiled part: importing all of torchvision takes seconds.
    for library in Path(spec.origin).parent.glob("_C*.so"):
        torch.ops.load_library(library)
    torch.ops.torchvision.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return Finding(name, "ok", "with its compiled operators")


def check_gpus(name: str) -> Finding:
    import torch

    count, built = num_gpus(), torch.version.cuda
    printed = "\n".join(filter(None, [nvidia_smi(), nvidia_smi("topo", "-m")]))
    if count:
        of = f"this PyTorch is built for CUDA {built}" if built else "this PyTorch counts them"
        return Finding(name, "ok", f"{format_count(count, 'GPU')}; {of}", printed=printed)
    advice = "the whole course runs on CPU"
    if printed:
        found = f"none that this PyTorch can use (built for CUDA {built or 'not at all'})"
        advice = f"make env TORCH=auto takes a build for this driver; until then, {advice}"
        return Finding(name, "note", found, advice, printed)
    return Finding(name, "ok", "none", f"{advice}; make env TORCH=cpu takes 3 GB less")


def check_nccl(name: str) -> Finding:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        number = ".".join(map(str, torch.cuda.nccl.version()))
        return Finding(name, "ok", f"{number}; takes one rank per GPU")
    return Finding(name, "ok", "not in this PyTorch: ranks on GPUs talk over gloo")


def check_gloo(name: str) -> Finding:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return Finding(name, "ok", "in this torch; connects ranks on CPU, or that share a GPU")
    return Finding(name, "stop", "not in this torch: ranks on CPU cannot talk", _REINSTALL)


def check_cores(name: str) -> Finding:
    if num_cores() > 1:
        return Finding(name, "ok", f"{num_cores()} for this process")
    advice = "everything works, but ranks take turns: more ranks are not faster"
    return Finding(name, "note", "1 for this process", advice)


def check_memory(name: str) -> Finding:
    if not MEMINFO.exists():
        return Finding(name, "ok", f"{hardware()['memory_gb']} GB in total")
    total_bytes, available_bytes = _memory_bytes()
    found = f"{format_bytes(available_bytes)} of {format_bytes(total_bytes)} available"
    if available_bytes >= ENOUGH_MEMORY_BYTES:
        return Finding(name, "ok", found)
    world_size = max(2, available_bytes // 2**30)
    advice = f"close other programs, or use world sizes up to {world_size}"
    return Finding(name, "note", found, advice)


def _memory_bytes() -> tuple[int, int]:
    """(total, available) of this machine, or of what its container may use."""
    rows = (line.split() for line in MEMINFO.read_text().splitlines())
    sizes = {row[0]: int(row[1]) * 1024 for row in rows}
    limit_bytes = sizes["MemTotal:"]
    with contextlib.suppress(OSError, ValueError):
        limit_bytes = min(limit_bytes, int(CONTAINER_MEMORY.read_text()))
    return limit_bytes, min(limit_bytes, sizes["MemAvailable:"])


def check_shm(name: str) -> Finding:
    if sys.platform != "linux":
        return Finding(name, "ok", "not used on this system")
    found = "missing"
    if SHM.is_dir():
        size = shutil.disk_usage(SHM)
        found = f"{format_bytes(size.free)} of {format_bytes(size.total)} free"
        if size.free >= ENOUGH_SHM_BYTES:
            return Finding(name, "ok", found)
    advice = (
        "labkit's ranks do without it, but a DataLoader's workers pass their batches through it. "
        "In a container: docker run --shm-size=1g; elsewhere, as root: "
        "mount -o remount,size=1g /dev/shm"
    )
    return Finding(name, "note", found, advice)


def check_start_method(name: str) -> Finding:
    if "forkserver" in multiprocessing.get_all_start_methods():
        return Finding(name, "ok", "forkserver: a run starts in tenths of a second")
    advice = "each run takes seconds to start; on Windows, use WSL"
    return Finding(name, "note", "spawn: this system has no forkserver", advice)


def check_digits(name: str) -> Finding:
    from labkit.workload.datasets import load_dataset

    try:
        data = load_dataset("digits")
    except (ValueError, OSError) as error:
        return Finding(name, "stop", "missing or damaged", str(error))
    train, test = len(data.train_targets), len(data.test_targets)
    return Finding(name, "ok", f"intact: {train:,} images to train on, {test:,} held out")


def check_notebooks(name: str) -> Finding:
    for root in (Path.cwd(), Path(__file__).resolve().parents[1]):
        if (folder := root / "notebooks").is_dir():
            return Finding(name, "ok", f"{len(list(folder.glob('*.ipynb')))} in {folder}")
    advice = f"they are neither here nor in {root}: run this from a clone of the workbook"
    return Finding(name, "note", "not found: only the command line works", advice)


def check_ray(name: str) -> Finding:
    if find_spec("ray") is None:
        return Finding(name, "ok", "not installed; only runs on other hosts need it: make cluster")
    from labkit.runtime.ray_ranks import connected

    found = f"{version('ray')}, not connected to a cluster; only runs on other hosts need one"
    try:
        nodes = [node["NodeManagerAddress"] for node in connected("...").nodes() if node["Alive"]]
    except ValueError as error:
        status = "note" if "RAY_ADDRESS" in os.environ else "ok"
        return Finding(name, status, found, str(error) if status == "note" else "")
    found = f"{version('ray')}, {format_count(len(nodes), 'node')}: {', '.join(nodes)}"
    return Finding(name, "ok", found)


def check_temporary_folder(name: str) -> Finding:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2**20))
    return Finding(name, "ok", f"{tempfile.gettempdir()} takes files")


def check_ranks(name: str) -> Finding:
    from labkit.runtime.launch import run

    started_s = time.perf_counter()
    values = run(swap_numbers, world_size=2, timeout_s=RANKS_TIMEOUT_S).values
    if values != [1.0, 0.0]:
        raise ArithmeticError(f"ranks 0 and 1 received {values}, not [1.0, 0.0]")
    took, chosen = format_seconds(time.perf_counter() - started_s), plan(2)
    devices = " and ".join(dict.fromkeys(chosen.devices))
    way = "shared memory" if chosen.transport == "shared" else chosen.backend
    return Finding(name, "ok", f"2 ranks on {devices}, over {way}, in {took}")


def swap_numbers(comm) -> float:
    """On 2 ranks: send a tensor of this rank's number, return the other's."""
    import torch

    mine = torch.full((1024,), float(comm.rank), device=comm.device)
    theirs = torch.empty_like(mine)
    return comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank).mean().item()


def check_speeds(name: str) -> Finding:
    """What a message between 2 ranks costs, on each way that this machine has."""
    ways: dict[str, dict[str, Any]] = {"cpu": {"device": "cpu"}}
    count, found, status = num_gpus(), {}, "ok"
    if count:
        ways |= {"NCCL": {"device": "cuda", "transport": "auto"}} if count > 1 else {}
        ways["gloo"] = {"device": "cuda", "transport": "gloo"}
    for way, settings in ways.items():
        try:
            found |= _speed(**settings)
        except Exception as error:
            found[way] = f"does not work: {_one_line(error)}"
            status = "note"
    rows = [f"{way}: {speed}" for way, speed in found.items()]
    advice = "transport= of labkit.run chooses one that works; if none does, see ranks talk above"
    if not rows[1:]:
        return Finding(name, status, rows[0], advice if status == "note" else "")
    told = "what a message costs, way by way"
    printed = "\n".join(f"    {row}" for row in rows)
    return Finding(name, status, told, advice if status == "note" else "", printed)


def _speed(**settings: Any) -> dict[str, str]:
    """{what moves the bytes between which devices: microseconds per message, bytes per second}."""
    from labkit.costs import Link
    from labkit.training.measured_link import measure_link

    # Ranks that share a GPU print a note; the row says it.
    with contextlib.redirect_stderr(io.StringIO()):
        link = measure_link(2, sizes_bytes=LINK_BYTES, repeats=3, **settings)
    devices = list(dict.fromkeys(plan(2, **settings).devices))
    both = "" if devices[1:] or devices == ["cpu"] else ", both ranks"
    return {f"{link.transport} on {' and '.join(devices)}{both}": Link.__str__(link)}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split("\n\n")[0].split())
    return textwrap.shorten(f"{type(error).__name__}: {text}", 200, placeholder=" ...")


CHECKS: dict[str, Callable[[str], Finding]] = {
    "labkit": check_labkit,
    "Python": check_python,
    **dict.fromkeys(PACKAGES, check_package),
    "torch loads": check_torch_loads,
    "torchvision loads": check_torchvision_loads,
    "GPUs": check_gpus,
    "NCCL": check_nccl,
    "gloo": check_gloo,
    "cores": check_cores,
    "memory": check_memory,
    "/dev/shm": check_shm,
    "start method": check_start_method,
    "digits": check_digits,
    "notebooks": check_notebooks,
    "temporary folder": check_temporary_folder,
    "Ray": check_ray,
    "ranks talk": check_ranks,
    "rank to rank": check_speeds,
}
