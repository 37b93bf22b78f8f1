"""Programs that ``tools/other_framework.py`` runs, and what their failures mean."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What a shell, or the make around this program, has set for other builds.
_FOREIGN = re.compile(r"HOROVOD_|CUDA_|MAKE|MFLAGS|PYTHON|VIRTUAL_ENV|CMAKE_")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class CannotMakeError(Exception):
    """Why there is no environment, and what to do: one line."""


@dataclass(frozen=True)
class Ran:
    """A program that has ended.

    Attributes:
        code: its exit code; None if it was ended because its time was over.
        text: what it printed.
    """

    code: int | None
    text: str

    @property
    def reason(self) -> str:
        """The line that most likely says what was wrong: uv's last cause, or the last line."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        causes = [line.removeprefix("cause: ") for line in lines if line.startswith("cause: ")]
        return ([*lines[-1:], *causes[-1:]] or ["it printed nothing"])[-1][:300]

    def why_not_installed(self, memory_gb: float) -> str:
        """What uv's words mean, without a full stop at the end."""
        if "No space left on device" in self.text:
            return "the disk is full: make room"
        if re.search(r"Killed|out of memory|cannot allocate memory", self.text, re.IGNORECASE):
            return f"a compiler was killed: {memory_gb:g} GB of free memory are needed; end others"
        if failed := re.search(r"Failed to build `([\w.=-]+)`", self.text):
            error = re.search(r"CMake Error.*\n\s*.*|.*\S: (?:fatal )?error: .*", self.text)
            why = " ".join(error[0].split())[:300] if error else self.reason
            return f"{failed[1]} cannot be compiled here ({why})"
        names = re.findall(r"([\w.-]+==[\w.+]+)|/simple/([\w.-]+)/", self.text)
        name = "".join(names[0]) if names else "a package"
        if "Hash mismatch" in self.text:
            return f"{name} at the index is not the file whose hash is pinned: do not use it"
        return f"{name} cannot be had ({self.reason}): is the package index in reach?"


def run(
    words: Sequence[str | Path],
    log: Path,
    folder: Path,
    timeout_s: float | None = None,
    **environment: str,
) -> Ran:
    """Run a program of an environment; it ends with this process, whatever ends that.

    Args:
        log: its output is added to this file; lines about downloads are printed, too.
        folder: the environment, whose programs come first in PATH.
    """
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    # A signal waits until there is a child to end: in between, its own children would stay.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    child = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**clean_environment(), "PATH": path, **environment},
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    late, lines = threading.Event(), []
    timer = threading.Timer(timeout_s or threading.TIMEOUT_MAX, _end, (child, late))
    timer.daemon = True
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        timer.start()
        with log.open("a") as file:
            for line in child.stdout or ():
                lines.append(line)
                file.write(line)
                if line.startswith("Downloading"):
                    print(f"  {line}", end="", flush=True)
        code = child.wait()
    finally:
        timer.cancel()
        _end(child)
    return Ran(None if late.is_set() else code, "".join(lines))


def answer(words: Sequence[str | Path]) -> str:
    """What a program prints.

    Raises:
        CannotMakeError: it fails.
    """
    ran = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=clean_environment(),
        preexec_fn=_end_with_parent,
    )
    if ran.returncode:
        said = (ran.stderr + ran.stdout).strip() or "it printed nothing"
        raise CannotMakeError(f"{words[0]} does not run: {said.splitlines()[0][:300]}")
    return ran.stdout.strip()


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}


def free_memory_gb() -> float:
    """What the kernel could give to new programs; infinite where it does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found[1]) * 1024 / 1e9 if found else float("inf")
    return float("inf")


def _end(child: subprocess.Popen, late: threading.Event | None = None) -> None:
    """End a program and all that it has started in its session; nothing if it has ended."""
    if late is not None:
        late.set()
    for number, wait_s in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, number)
            child.wait(wait_s)


def _end_with_parent() -> None:
    """In the new process: the kernel kills it when the one that has started it ends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
