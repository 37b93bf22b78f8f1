"""``python -m labkit doctor``: what this machine has, and what to do if something is missing.

A check returns what it has found, advice if something should be changed, and what is printed
below as it is; an exception becomes a finding, too. Packages that may be absent or broken are
imported inside their checks, so that the doctor also runs where the installation is broken.
"""

import contextlib
import io
import os
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version

from labkit.devices import hardware, num_cores, plan
from labkit.gpus import num_gpus, nvidia_smi
from labkit.units import format_bytes, format_count, format_seconds

WIDTH = 99
# (found, advice, printed); what is left out is empty.
Found = tuple[str, ...]
ENOUGH_SHM_BYTES = 512 * 2**20
# Without these the course does not run; what else is wrong is a note.
STOPS = ("torch", "digits", "ranks talk")
PACKAGES = ("torch", "torchvision", "matplotlib", "jupyterlab", "ipywidgets", "nbval")
_INSTALL = "in the workbook's folder: python -m pip install -r requirements.txt -e ."
_REINSTALL = (
    "torch and torchvision must be a pair, both CUDA builds or both CPU builds; in the workbook's "
    "folder: python -m pip install --force-reinstall -c requirements.txt torch torchvision"
)
_IF_RAISED = {
    "torch": _REINSTALL,
    "torchvision": _REINSTALL,
    "ranks talk": "first fix what is above. Ranks talk over 127.0.0.1: a firewall may forbid it. "
    "If the path is too long, set TMPDIR=/tmp; if the GPUs are at fault, set "
    "CUDA_VISIBLE_DEVICES=-1 to work without them. This prints the whole error: "
    "python -m labkit train --strategy ring_all_reduce --world-size 2",
}


def main() -> int:
    """Print each finding as it is made; return 1 if something stops the course, else 0."""
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
        found, advice, printed = _one_line(error), _IF_RAISED.get(name, _INSTALL), ""
    status = "stop" if advice and name in STOPS else "note" if advice else "ok"
    head = f"{name:<13}  {status:<4}  "
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


def check_python() -> Found:
    return (f"{platform.python_version()} at {sys.executable}; labkit {version('labkit')}",)


def check_packages() -> Found:
    from packaging.requirements import Requirement

    ranges = {one.name: one.specifier for one in map(Requirement, requires("labkit") or ())}
    found, wrong = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
            if not ranges[name].contains(version(name), prereleases=True):
                wrong.append(f"{name} is made for {ranges[name]}")
        except PackageNotFoundError:
            wrong.append(f"{name} is not installed")
    return ", ".join(found), f"{'; '.join(wrong)}: {_INSTALL}" if wrong else ""


def check_torch() -> Found:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return f"{built}, without gloo: ranks on CPU cannot talk", _REINSTALL
    has_nccl = torch.distributed.is_nccl_available()
    return (f"{built}, with gloo{' and NCCL' if has_nccl else ''}",)


def check_torchvision() -> Found:
    import torch
    import torchvision

    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
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


def check_cores() -> Found:
    found = f"{num_cores()} for this process, {hardware()['memory_gb']} GB of memory"
    if num_cores() > 1:
        return (found,)
    return found, "everything works, but ranks take turns: more are not faster"


def check_shm() -> Found:
    if not os.path.isdir("/dev/shm"):
        return ("not used on this system",)
    size = shutil.disk_usage("/dev/shm")
    found = f"{format_bytes(size.free)} of {format_bytes(size.total)} free"
    if size.free >= ENOUGH_SHM_BYTES:
        return (found,)
    return found, (
        "labkit's ranks do without it, but a DataLoader's workers pass their batches through it. "
        "In a container: docker run --shm-size=1g; elsewhere, as root: "
        "mount -o remount,size=1g /dev/shm"
    )


def check_digits() -> Found:
    from labkit.workload.datasets import load_dataset

    try:
        data = load_dataset("digits")
    except (ValueError, OSError) as error:
        return "missing or damaged", str(error)
    train, test = len(data.train_targets), len(data.test_targets)
    return (f"intact: {train:,} images to train on, {test:,} held out",)


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
    from labkit.training.measured import measure_link

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
    "Python": check_python,
    "packages": check_packages,
    "torch": check_torch,
    "torchvision": check_torchvision,
    "GPUs": check_gpus,
    "cores": check_cores,
    "/dev/shm": check_shm,
    "digits": check_digits,
    "ranks talk": check_ranks,
    "rank to rank": check_speeds,
}
