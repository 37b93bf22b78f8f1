"""``python -m labkit doctor``: what this machine has, and what to do if something is missing.

A check returns what it has found, advice if something should be changed, and what is printed
below as it is; an exception becomes a finding, too. Packages that may be absent or broken are
imported inside their checks, so that the doctor also runs where the installation is broken.
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
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path

from labkit.devices import hardware, num_cores, plan
from labkit.gpus import num_gpus, nvidia_smi
from labkit.units import format_bytes, format_count, format_seconds

WIDTH = 99
# (found, advice, printed); what is left out is empty.
Found = tuple[str, ...]
ENOUGH_MEMORY_BYTES = 4 * 2**30
ENOUGH_SHM_BYTES = 512 * 2**20
# Without these the course does not run; what else is wrong is a note.
STOPS = ("Python", "torch", "matplotlib", "torch loads", "gloo", "digits", "temporary folder")
STOPS += ("ranks talk",)
PACKAGES = {
    "torch": "everything runs on it",
    "torchvision": "for ResNet-18, VGG16, MobileNetV2 and the data sets to download",
    "matplotlib": "every page draws with it",
    "jupyterlab": "make lab opens the pages in it; another notebook editor works, too",
    "ipywidgets": "the sliders need it; the figures beside them do not",
    "nbval": "make test runs the notebooks with it",
}
_INSTALL = "in the workbook's folder: python -m pip install -r requirements.txt -e ."
_REINSTALL = (
    "torch and torchvision must be a pair, both CUDA builds or both CPU builds; in the workbook's "
    "folder: python -m pip install --force-reinstall -c requirements.txt torch torchvision"
)
_IF_RAISED = {
    "torch loads": _REINSTALL,
    "torchvision loads": _REINSTALL,
    "temporary folder": "free some space, or set TMPDIR to a folder that you may write to",
    "ranks talk": "first fix what is above. Ranks talk over 127.0.0.1: a firewall may forbid it. "
    "If the path is too long, set TMPDIR=/tmp; if the GPUs are at fault, set "
    "CUDA_VISIBLE_DEVICES=-1 to work without them. This prints the whole error: "
    "python -m labkit train --strategy ring_all_reduce --world-size 2",
}


def main() -> int:
    """Print each finding as it is made; return 1 if something stops the course, else 0."""
    with contextlib.suppress(Exception):  # what fails here fails again in check_ranks
        from labkit.runtime.preload import warm_up

        # The process that ranks are forked from imports torch while the checks run here.
        warm_up(training=False)
    stops = []
    try:
        for name in CHECKS:
            status, lines = examine(name)
            print(lines, flush=True)
            stops += [name] if status == "stop" else []
    except KeyboardInterrupt:
        print("labkit: stopped", file=sys.stderr)
        return 130
    if stops:
        print(f"\nThe course does not run here yet. First fix: {', '.join(stops)}.")
    else:
        print("\nThe course runs on this machine.")
    return 1 if stops else 0


def examine(name: str) -> tuple[str, str]:
    """Run a check: (``ok``, ``note`` or ``stop``, its lines, wrapped at WIDTH in one column)."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found, advice, printed = (*CHECKS[name](), "", "")[:3]
    except Exception as error:
        broken = f"could not be checked; if the installation is at fault, {_INSTALL}"
        found, advice, printed = _one_line(error), _IF_RAISED.get(name, broken), ""
    status = "stop" if advice and name in STOPS else "note" if advice else "ok"
    head = f"{name:<17}  {status:<4}  "
    rows = [(head, found), (" " * (len(head) - 3) + "-> ", advice)]
    wrapped = [
        textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(head))
        for start, text in rows
        if text
    ]
    return status, "\n".join(wrapped + printed.splitlines())


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split("\n\n")[0].split())
    return textwrap.shorten(f"{type(error).__name__}: {text}", 200, placeholder=" ...")


def check_labkit() -> Found:
    return (f"{version('labkit')} in {Path(__file__).parent}",)


def check_python() -> Found:
    from packaging.specifiers import SpecifierSet

    found, wanted = platform.python_version(), metadata("labkit")["Requires-Python"]
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return (f"{found} ({wanted}) at {sys.executable}",)
    advice = "set up with a newer one: make distclean, then make env PYTHON=python3.12"
    return f"{found}, but labkit needs {wanted}", advice


def check_package(name: str) -> Found:
    from packaging.requirements import Requirement

    try:
        found = version(name)
    except PackageNotFoundError:
        return f"not installed ({PACKAGES[name]})", _INSTALL
    needed = map(Requirement, requires("labkit") or ())
    ranges = {requirement.name: requirement.specifier for requirement in needed}
    # Another version is said, and never a stop: packages are also loaded below.
    fits = ranges[name].contains(found, prereleases=True)
    return (f"{found} ({ranges[name]})" if fits else f"{found}, but made for {ranges[name]}",)


def check_torch_loads() -> Found:
    import torch

    cuda = torch.version.cuda
    return (f"built for CUDA {cuda}" if cuda else "built without CUDA",)


def check_torchvision_loads() -> Found:
    import torch

    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torchvision'")
    # Only its compiled part: importing all of torchvision takes seconds.
    for library in Path(spec.origin).parent.glob("_C*.so"):
        torch.ops.load_library(library)
    torch.ops.torchvision.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return ("with its compiled operators",)


def check_gpus() -> Found:
    import torch

    count, built = num_gpus(), torch.version.cuda
    printed = "\n".join(filter(None, [nvidia_smi(), nvidia_smi("topo", "-m")]))
    if count:
        of = f"this PyTorch is built for CUDA {built}" if built else "this PyTorch counts them"
        return f"{format_count(count, 'GPU')}; {of}", "", printed
    if printed:
        found = f"none that this PyTorch can use (built for CUDA {built or 'not at all'})"
        advice = "make env TORCH=auto takes a build for this driver; the course runs on CPU, too"
        return found, advice, printed
    return ("none: the whole course runs on CPU; make env TORCH=cpu takes 3 GB less",)


def check_nccl() -> Found:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return (f"{'.'.join(map(str, torch.cuda.nccl.version()))}; takes one rank per GPU",)
    return ("not in this PyTorch: ranks on GPUs talk over gloo",)


def check_gloo() -> Found:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return ("in this torch; connects ranks on CPU, or that share a GPU",)
    return "not in this torch: ranks on CPU cannot talk", _REINSTALL


def check_cores() -> Found:
    if num_cores() > 1:
        return (f"{num_cores()} for this process",)
    return "1 for this process", "everything works, but ranks take turns: more are not faster"


def check_memory() -> Found:
    if not Path("/proc/meminfo").exists():
        return (f"{hardware()['memory_gb']} GB in total",)
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {row[0]: int(row[1]) * 1024 for row in rows}
    total = sizes["MemTotal:"]
    # What a container may use; the file is absent, or says "max", where there is no limit.
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    available = min(total, sizes["MemAvailable:"])
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    if available >= ENOUGH_MEMORY_BYTES:
        return (found,)
    return found, f"close other programs, or use world sizes up to {max(2, available // 2**30)}"


def check_shm() -> Found:
    if sys.platform != "linux":
        return ("not used on this system",)
    found, folder = "missing", Path("/dev/shm")
    if folder.is_dir():
        size = shutil.disk_usage(folder)
        found = f"{format_bytes(size.free)} of {format_bytes(size.total)} free"
        if size.free >= ENOUGH_SHM_BYTES:
            return (found,)
    return found, (
        "labkit's ranks do without it, but a DataLoader's workers pass their batches through it. "
        "In a container: docker run --shm-size=1g; elsewhere, as root: "
        "mount -o remount,size=1g /dev/shm"
    )


def check_start_method() -> Found:
    if "forkserver" in multiprocessing.get_all_start_methods():
        return ("forkserver: a run starts in tenths of a second",)
    advice = "each run takes seconds to start; on Windows, use WSL"
    return "spawn: this system has no forkserver", advice


def check_digits() -> Found:
    from labkit.workload.datasets import load_dataset

    try:
        data = load_dataset("digits")
    except (ValueError, OSError) as error:
        return "missing or damaged", str(error)
    train, test = len(data.train_targets), len(data.test_targets)
    return (f"intact: {train:,} images to train on, {test:,} held out",)


def check_notebooks() -> Found:
    for root in (Path.cwd(), Path(__file__).resolve().parents[1]):
        if (folder := root / "notebooks").is_dir():
            return (f"{len(list(folder.glob('*.ipynb')))} in {folder}",)
    advice = f"they are neither here nor in {root}: run this from a clone of the workbook"
    return "not found: only the command line works", advice


def check_temporary_folder() -> Found:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2**20))
    return (f"{tempfile.gettempdir()} takes files",)


def check_ray() -> Found:
    if find_spec("ray") is None:
        return ("not installed; only runs on other hosts need it: make cluster",)
    from labkit.runtime.ray_ranks import connected

    try:
        nodes = [node["NodeManagerAddress"] for node in connected("...").nodes() if node["Alive"]]
    except ValueError as error:
        found = f"{version('ray')}, not connected to a cluster; only runs on other hosts need one"
        return found, str(error) if "RAY_ADDRESS" in os.environ else ""
    return (f"{version('ray')}, {format_count(len(nodes), 'node')}: {', '.join(nodes)}",)


def check_ranks() -> Found:
    from labkit.runtime.launch import run

    started_s = time.perf_counter()
    values = run(swap_numbers, world_size=2, timeout_s=60).values
    if values != [1.0, 0.0]:
        raise ArithmeticError(f"ranks 0 and 1 received {values}, not [1.0, 0.0]")
    took, chosen = format_seconds(time.perf_counter() - started_s), plan(2)
    devices = " and ".join(dict.fromkeys(chosen.devices))
    way = "shared memory" if chosen.transport == "shared" else chosen.backend
    return (f"2 ranks on {devices}, over {way}, in {took}",)


def swap_numbers(comm) -> float:
    """On 2 ranks: send a tensor of this rank's number, return the other's."""
    import torch

    mine = torch.full((1024,), float(comm.rank), device=comm.device)
    theirs = torch.empty_like(mine)
    return comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank).mean().item()


def check_speeds() -> Found:
    """What a message between 2 ranks costs, on each way that this machine has."""
    from labkit.costs import Link
    from labkit.training.measured_link import measure_link

    ways = [("cpu", "auto")]
    ways += [("cuda", "auto")] * (num_gpus() > 1) + [("cuda", "gloo")] * (num_gpus() > 0)
    rows, advice = [], ""
    for device, transport in ways:
        where = " and ".join(dict.fromkeys(plan(2, device, transport).devices))
        try:
            # Ranks that share a GPU print a note.
            with contextlib.redirect_stderr(io.StringIO()):
                link = measure_link(
                    2, sizes_bytes=(2**12, 2**22), repeats=3, device=device, transport=transport
                )
            rows.append(f"{link.transport} on {where}: {Link.__str__(link)}")
        except Exception as error:
            rows.append(f"{transport} on {where} does not work: {_one_line(error)}")
            advice = "transport= of labkit.run chooses one that works"
    if len(rows) == 1:
        return rows[0], advice
    return "what a message costs, way by way", advice, "\n".join(f"    {row}" for row in rows)


CHECKS: dict[str, Callable[[], Found]] = {
    "labkit": check_labkit,
    "Python": check_python,
    **{name: partial(check_package, name) for name in PACKAGES},
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
