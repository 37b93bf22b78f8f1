"""What the rows of the fault table share (tests/engine/runtime/test_fault_table.py).

Whatever a row does, at its end nothing may be left, and the next run works.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import leftovers, open_descriptors, running_ranks, session_of, wait_until

from labkit import WorkerError, run

# The table's limit for the end of a failed run, and how much longer a busy machine may take.
LIMIT_S = 10.0
PATIENCE = 3
# How long what is left may take to go.
WAIT_S = 60.0
ROOT = Path(__file__).resolve().parents[1]


class Fault:
    """A run that must fail: ``run(fn, *args, **options)``, and the words of its error.

    Args:
        says: parts of the error's text; one that begins with ``~`` is a pattern.
        rank: the rank that the error must name, in words and as its attribute.
        error: the error's class.
    """

    def __init__(
        self,
        fn: Callable,
        *args: object,
        says: Sequence[str] = (),
        rank: int | None = None,
        error: type[BaseException] = WorkerError,
        **options: object,
    ):
        self.call, self.options = (fn, *args), {"world_size": 2, **options}
        self.says, self.rank, self.error = says, rank, error


@dataclass
class Case:
    """The cases of one row.

    Attributes:
        folder: an empty folder of the row.
        patch: the changes of this row, undone at its end.
        capsys: pytest's; what is printed.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture

    def fails(self, fault: Fault) -> None:
        """The run must fail in time with one error that has all of the fault's words."""
        limit_s = max(LIMIT_S, fault.options.get("timeout_s", 0)) * PATIENCE
        with self.timed(limit_s), pytest.raises(fault.error) as caught:
            run(*fault.call, **fault.options)
        assert not running_ranks(), "ranks not joined"
        found = caught.value
        check_words(str(found), fault.says)
        # The learner's lines, without ours around them.
        assert "labkit/engine/runtime/worker.py" not in str(found)
        if fault.rank is not None:
            assert f"rank {fault.rank}" in str(found)
            assert found.rank == fault.rank, f"rank {found.rank} in {found}"

    def refused(
        self, call: Callable[[], object], *says: str, error: type[Exception] = ValueError
    ) -> None:
        """Call what must be refused, with one error that has these words."""
        with self.timed(), pytest.raises(error) as caught:
            call()
        check_words(str(caught.value), says)

    @contextlib.contextmanager
    def timed(self, limit_s: float = LIMIT_S * PATIENCE) -> Iterator[None]:
        """One case, which may not take longer than ``limit_s``."""
        started_s = time.monotonic()
        yield
        assert time.monotonic() - started_s < limit_s

    @contextlib.contextmanager
    def row(self) -> Iterator[None]:
        """Around a row's cases: nothing is left, and the next run works."""
        before, threads, pipes = leftovers(), _threads(), _pipes()
        yield
        self.patch.undo()
        assert wait_until(lambda: not running_ranks(), 60), f"ranks left: {running_ranks()}"
        assert leftovers() <= before, f"left: {leftovers() - before}"
        assert wait_until(lambda: not _threads() - threads, WAIT_S), _threads() - threads
        assert wait_until(lambda: _pipes() <= pipes, WAIT_S), "pipes, sockets or memory were left"
        assert not [p for p in self.folder.rglob("*") if p.suffix == ".part"], "half a file"
        assert run(lambda comm: comm.rank, world_size=2).values == [0, 1]
        assert "Traceback" not in self.capsys.readouterr().err


def check_words(text: str, words: Sequence[str]) -> None:
    """Whether a text has all of these words; one that begins with ``~`` is a pattern."""
    for one in words:
        there = re.search(one[1:], text) if one.startswith("~") else one in text
        assert there, f"{one!r} is not in: {text}"


def _threads() -> set[threading.Thread]:
    """The threads of this process, but for the one that tqdm keeps."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


def _pipes() -> int:
    """How many pipes, sockets and memory files are open, once garbage is collected."""
    return sum(map(open_descriptors, ("pipe:", "socket:", "memfd:")))


# A process like a notebook's kernel

CELLS = """
import os, sys
import torch, labkit

if __name__ == "__main__":
    print("ready", flush=True)
    cells, marks = sys.stdin, iter(range(10**6))
    for header in cells:
        source = cells.read(int(header))
        # Its own file, as a notebook's cell has one: errors quote its lines.
        name = os.path.join(sys.argv[1], f"cell_{next(marks)}.py")
        with open(name, "w") as file:
            file.write(source)
        try:
            exec(compile(source, name, "exec"), globals())
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        print("done with it", flush=True)
"""
# A file system of its own for what a row fills, and a small /dev/shm: nobody else sees either.
OWN_DISKS = """
mount -t tmpfs -o size=4k tmpfs /dev/shm && mount -t tmpfs -o size=64k tmpfs "$1/disk" || exit 77
shift
exec "$@"
"""


class Kernel:
    """A process that runs cells, in a session of its own, with a pretended GPU.

    Attributes:
        has_disks: whether it has a /dev/shm of 4 KiB, and a disk of 64 KiB in ``disk``.
    """

    def __init__(self, folder: Path):
        self.disk = folder / "disk"
        self.disk.mkdir()
        (folder / "kernel.py").write_text(CELLS)
        command = [sys.executable, str(folder / "kernel.py"), str(folder)]
        own = [] if os.geteuid() == 0 else ["--map-root-user"]
        unshare = ["unshare", "--mount", *own, "sh", "-c", OWN_DISKS, "sh", folder]
        self.has_disks = bool(shutil.which("unshare"))
        if self.has_disks:
            self._process = self._popen([*unshare, *command], folder)
            self.has_disks = self.line() == "ready\n"
        if not self.has_disks:
            self._process = self._popen(command, folder)
            assert self.line() == "ready\n"

    def _popen(self, command: list, folder: Path) -> subprocess.Popen:
        # (The Makefile turns live output off for notebooks.)
        hidden = ("VISIBLE_DEVICES", "LABKIT_LIVE")
        environment = {k: v for k, v in os.environ.items() if not k.endswith(hidden)}
        paths = os.pathsep.join(map(str, (ROOT / "tests" / "pretended", ROOT)))
        own = {"LABKIT_PRETEND_GPUS": "1", "PYTHONPATH": paths, "TMPDIR": str(folder)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        settings = {"text": True, "start_new_session": True, "env": environment | own}
        # Under nohup it would ignore a terminal that closes.
        settings["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
        return subprocess.Popen(command, **pipes, **settings)

    @property
    def session(self) -> list[int]:
        """Its process and all that it has started."""
        return session_of(self._process.pid)

    def send(self, cell: str) -> None:
        """Start a cell."""
        source = textwrap.dedent(cell)
        self._process.stdin.write(f"{len(source)}\n{source}")
        self._process.stdin.flush()

    def line(self) -> str:
        return self._process.stdout.readline()

    def printed(self) -> str:
        """What the cell has printed, when it has ended; its error as one line."""
        lines = iter(self.line, "")
        return "".join(itertools.takewhile(lambda line: line != "done with it\n", lines))

    def runs(self, cell: str) -> str:
        """Run a cell, and return what it prints."""
        self.send(cell)
        return self.printed()

    def interrupt(self) -> None:
        """Send SIGINT to all of its processes, as a terminal does for Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)

    def hang_up(self) -> None:
        """Send SIGHUP to all of its processes, as a terminal does that closes."""
        os.killpg(self._process.pid, signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to its process alone."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pid in self.session:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
