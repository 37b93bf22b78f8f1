"""What the tests with real ranks share: run helpers, and the check that nothing is left behind."""

import contextlib
import gc
import multiprocessing.forkserver as forkserver
import os
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import cloudpickle


def travel_by_value(module_name: str) -> None:
    """Let a test module's functions reach the ranks as a notebook's do: by value."""
    cloudpickle.register_pickle_by_value(sys.modules[module_name])


def running_ranks() -> list[int]:
    """Process ids of the ranks that are alive: the children of this process's forkserver."""
    server = forkserver._forkserver._forkserver_pid
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if server and int(fields[1]) == server and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def leftovers() -> set[str]:
    """What a run could have left: shared memory mapped here, files in this process's temporary
    folder (the tests have one each); the forkserver's own folder lives as long as the process."""
    maps = Path("/proc/self/maps").read_text().split()
    shared = {name for name in maps if name.startswith("/dev/shm/") and Path(name).exists()}
    folder = Path(tempfile.gettempdir())
    expected = ("pymp-", "pytest-of-", "torchinductor_")
    return shared | {str(f) for f in folder.iterdir() if not f.name.startswith(expected)}


def wait_until(condition, seconds: float) -> bool:
    """Poll until ``condition()`` holds; whether it did in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def group_of(leader: int) -> list[int]:
    """Process ids of a process group."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(int(pid)) == leader:
                found.append(int(pid))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def write_program_that_never_ends(folder: Path) -> Path:
    """``SCRIPT FOLDER`` runs two ranks that meet forever, each known by a file PID.pid."""
    script = folder / "kernel.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from labkit import run

        def works(comm):
            open(f"{sys.argv[1]}/{os.getpid()}.pid", "w").close()
            while True:
                comm.barrier()

        if __name__ == "__main__":
            run(works, world_size=2)
        """)
    )
    return script


def open_descriptors(of: str = "") -> int:
    """How many files this process holds open, those whose names contain ``of``."""
    # What an earlier test left to the garbage collector must not go in the middle of this one.
    gc.collect()
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += of in os.readlink(f"/proc/self/fd/{number}")
    return found
