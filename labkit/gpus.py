"""Which GPUs of this machine can be used: a GPU counts once a kernel has run on it.

The driver also lists GPUs on which nothing runs: with a driver that is too old for this PyTorch, a
card that it no longer supports, or a GPU that another program holds for itself. So each is tried
once, in a process of its own: the process that asks never initialises CUDA, and a driver that
never answers cannot stop it. Processes that ask at the same time share one trial.

This file is also the program of the trying process, which runs it without importing the package.
"""

import atexit
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

# To import torch and initialise CUDA takes seconds, on a slow disk many more.
_PATIENCE_S = 60.0
# With GPUs that stop the trying process, so that the others are tried in a new one.
_PATIENCE_FOR_ALL_S = 120.0
_KILLED_PATIENCE_S = 2.0
# How long others may take over the result of a trial. The ranks of one torchrun always do.
_SHARED_S = 30.0
# What decides which GPUs are visible, and how they are numbered.
_CHOSEN_BY = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
_CHOSEN_BY += ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# What NVIDIA's driver brings, on Linux and in Linux under Windows. PyTorch knows others itself.
_DRIVERS = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
# The error of a GPU whose trial has begun.
_BEGUN = "begun"
_OTHER_BUILD = "install a PyTorch that fits (make env TORCH=auto)"
# What CUDA and PyTorch say -> what it means, and what to do about it.
_REASONS = {
    r"driver .*(too old|insufficient)": (
        "the driver{driver} is too old for this PyTorch, which is built for CUDA {cuda}: update "
        f"the driver, or {_OTHER_BUILD}"
    ),
    r"no kernel image|not compatible": (
        "its architecture sm_{major}{minor} is not among those that this PyTorch is built for "
        f"({{architectures}}): {_OTHER_BUILD}, or leave this GPU out"
    ),
    r"busy or unavailable|devices are busy|exclusive": (
        "another program holds it for itself (exclusive compute mode, see nvidia-smi): wait until "
        "that program has ended, or choose other GPUs with CUDA_VISIBLE_DEVICES"
    ),
    r"No CUDA GPUs are available": (
        "the driver shows none to this process (CUDA_VISIBLE_DEVICES is {visible}; nvidia-smi "
        "lists those of the machine)"
    ),
    r"out of memory": (
        "other programs have taken its memory (nvidia-smi shows them): wait until they have "
        "ended, or choose other GPUs with CUDA_VISIBLE_DEVICES"
    ),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU as PyTorch numbers it here: ``cuda:{index}``; ``error`` is empty if it can be used."""

    index: int
    name: str = ""
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    error: str = ""


@dataclass(frozen=True)
class Gpus:
    """What trying them has shown.

    Attributes:
        usable: the GPUs on which a kernel has run.
        why_not: why others that the driver lists do not count, and what to do about it, in one
            line; empty if all do.
    """

    usable: tuple[Gpu, ...] = ()
    why_not: str = ""


def found() -> Gpus:
    """The visible GPUs, tried once per process and setting of CUDA_VISIBLE_DEVICES.

    It takes some seconds where there are GPUs, no time elsewhere, and raises no error.
    """
    return _found(_chosen())


def may_exist() -> bool:
    """Whether this process may see a GPU, without importing torch: a driver is here."""
    # CUDA takes anything that does not begin with a GPU, as -1 or nothing, for an empty list.
    visible = re.match(r"\s*\+?\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    return bool(visible) and any(map(os.path.exists, _DRIVERS))


def synchronize(device: Any) -> None:
    """Wait until all that is queued on ``device`` has ended; on the CPU nothing is queued."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def synchronize_used(device: Any) -> None:
    """Wait until all that this process has queued has ended, on ``device`` and on any other GPU.

    A GPU that it has not used is left alone: to wait for it would take memory on it.
    """
    import torch

    synchronize(device)
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):
                synchronize(f"cuda:{index}")


def _chosen() -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, _CHOSEN_BY))


@functools.cache
def _found(chosen: tuple[str | None, ...]) -> Gpus:
    import torch

    is_built = torch.backends.cuda.is_built()
    # Without a driver PyTorch knows at once that it has no GPU, and with a broken one never.
    if not (may_exist() and is_built) and not torch.cuda.device_count():
        why = f"this PyTorch ({torch.__version__}) is built without CUDA: {_OTHER_BUILD}"
        return Gpus(why_not="" if is_built or not may_exist() else why)
    # The ranks of one torchrun have to agree, however late one of them asks.
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    run = run_id and f"{run_id} of {os.getppid()}"
    key = [*chosen, os.uname().nodename, torch.__version__, run]
    with _shared_file() as file:
        if file is None:
            return _tried()
        known = _read(file, key)
        gpus = known or _tried()
        if known is None:
            _write(file, key, gpus)
    return gpus


@contextlib.contextmanager
def _shared_file() -> Iterator[IO[str] | None]:
    """This user's file with the last result, locked; None where there can be no such file.

    Only one process at a time has it, so that those which ask at the same moment try each GPU
    once, and do not find it busy because of each other.
    """
    try:
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(_path(), flags, 0o600), "r+")
    except (ImportError, AttributeError, OSError):
        yield None
        return
    with file:
        status = os.fstat(file.fileno())
        is_ours = status.st_uid == os.getuid() and status.st_nlink == 1
        until_s = time.monotonic() + _PATIENCE_FOR_ALL_S
        while is_ours:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                is_ours = time.monotonic() < until_s
                time.sleep(0.05)
        yield file if is_ours else None


def _path() -> Path:
    return Path(tempfile.gettempdir()) / f"labkit-gpus-{os.getuid()}"


def _read(file: IO[str], key: list[str | None]) -> Gpus | None:
    """The result in the file, if it is for ``key`` and new enough."""
    try:
        row = json.load(file)
        is_new = 0 <= time.time() - row["at_s"] < _SHARED_S or key[-1] is not None
        if row["key"] != key or not is_new:
            return None
        return Gpus(tuple(map(_gpu, row["usable"])), str(row["why_not"]))
    except (ValueError, TypeError, KeyError):
        return None


def _write(file: IO[str], key: list[str | None], gpus: Gpus) -> None:
    with contextlib.suppress(OSError):
        atexit.register(_path().unlink, missing_ok=True)
        file.seek(0)
        file.truncate()
        json.dump({"at_s": time.time(), "key": key, **asdict(gpus)}, file)
        file.flush()


def _tried() -> Gpus:
    """Try all GPUs; one that stops the trying process does not keep the others from counting."""
    tried: dict[int, Gpu] = {}
    facts: dict[str, Any] = {}
    until_s = time.monotonic() + _PATIENCE_FOR_ALL_S
    while True:
        rows, end = _try_from(max(tried, default=-1) + 1, until_s)
        for row in rows:
            if "index" in row:
                tried[row["index"]] = _gpu(row)
            else:
                facts = row
        if not end:
            break
        is_at = next((gpu for gpu in tried.values() if gpu.error == _BEGUN), None)
        if is_at is None:
            return Gpus(_usable(tried), f"no GPU is used, since {end}")
        tried[is_at.index] = replace(is_at, error=end)
        untried = range(is_at.index + 1, facts["listed"])
        if not untried or time.monotonic() > until_s:
            late = f"it was not tried within {_PATIENCE_FOR_ALL_S:.0f} s"
            tried |= {index: Gpu(index, error=late) for index in untried}
            break
    if not tried:
        return Gpus(
            why_not=f"there is a driver, and no GPU: {_reason(facts.get('error', ''), facts)}"
        )
    return Gpus(_usable(tried), _why_not(tried, facts))


def _usable(tried: dict[int, Gpu]) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in tried.values() if not gpu.error)


def _why_not(tried: dict[int, Gpu], facts: dict[str, Any]) -> str:
    """The GPUs that do not count, those with the same reason together; empty if all count."""
    names: dict[str, list[str]] = {}
    for gpu in tried.values():
        if gpu.error:
            names.setdefault(_reason(gpu.error, facts, gpu), []).append(f"cuda:{gpu.index}")
    told = (f"{', '.join(gpus)} cannot be used: {reason}" for reason, gpus in names.items())
    return "; ".join(told)


def _reason(error: str, facts: dict[str, Any], gpu: Gpu | None = None) -> str:
    """What an error of CUDA means, and what to do about it."""
    version = re.search(r"found version (\d+)", error)
    # CUDA writes 11.4 as 11040.
    of_driver = divmod(int(version[1]) // 10, 100) if version else ()
    words = {
        "driver": f" (for CUDA {'.'.join(map(str, of_driver))})" if of_driver else "",
        "cuda": facts.get("cuda"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        "architectures": ", ".join(facts.get("architectures", ())),
    }
    major, minor = gpu.capability if gpu else (0, 0)
    for pattern, told in _REASONS.items():
        if re.search(pattern, error, re.IGNORECASE):
            return told.format(major=major, minor=minor, **words)
    return error or "the trying process gave no reason"


def _gpu(row: dict[str, Any]) -> Gpu:
    return Gpu(**row | {"capability": tuple(row.get("capability", (0, 0)))})


def _try_from(first: int, until_s: float) -> tuple[list[dict[str, Any]], str]:
    """Try the GPUs from ``first`` on in a new process.

    Returns:
        What it has printed, see ``_print_trials``, and why it ended early (empty if it did not).
    """
    patience_s = min(_PATIENCE_S, max(0.0, until_s - time.monotonic()))
    # -P: the folder of this file has modules with the names of Python's own.
    command = [sys.executable, "-P", __file__, str(first)]
    try:
        # Files, since a process that hangs in the driver cannot be ended and keeps its pipes open.
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
            code = _code_of(subprocess.Popen(command, **streams), patience_s)
            printed.seek(0)
            errors.seek(0)
            ours = [line for line in printed if re.fullmatch(r'\{"(index|listed)".*\}\n', line)]
            last = [f"exit code {code}", *(line.strip() for line in errors if line.strip())][-1]
    except OSError as error:
        return [], f"the process that tries them cannot be started ({error})"
    rows = list(map(json.loads, ours))
    if code is None:
        hangs = "the driver hangs (does nvidia-smi answer?): restart the machine, or leave it out"
        return rows, f"nothing has come back within {patience_s:.0f} s: {hangs}"
    return rows, f"the process that tried it has ended: {last}" if code else ""


def _code_of(process: subprocess.Popen, patience_s: float) -> int | None:
    """The exit code of a process; None if it has not ended in time and was killed."""
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            # Not even a killed process ends while the driver holds it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_PATIENCE_S)


def _print_trials(first: int) -> None:
    """Print a line of JSON about PyTorch, and two per GPU from ``first`` on: begun, and done."""
    import torch

    facts: dict[str, Any] = {"listed": torch.cuda.device_count(), "cuda": torch.version.cuda}
    facts["architectures"] = torch.cuda.get_arch_list()
    if not facts["listed"]:
        facts["error"] = _first_error(torch.cuda.init)
    print(json.dumps(facts), flush=True)
    for index in range(first, facts["listed"]):
        found: dict[str, Any] = {"index": index, "error": _BEGUN}
        print(json.dumps(found), flush=True)
        found["error"] = _first_error(functools.partial(_try_one, index, found))
        print(json.dumps(found), flush=True)


def _try_one(index: int, found: dict[str, Any]) -> None:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    found |= {"name": gpu.name, "memory_bytes": gpu.total_memory}
    found["capability"] = (gpu.major, gpu.minor)
    ones = torch.ones(2, device=f"cuda:{index}")
    if (total := (ones * 2).sum().item()) != 4:
        raise RuntimeError(f"it computes wrong results (1 x 2 + 1 x 2 = {total})")


def _first_error(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ""


if __name__ == "__main__":
    _print_trials(int(sys.argv[1]))
