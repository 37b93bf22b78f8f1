"""A command in processes of its own, of which nothing remains."""

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.comm.shared_memory import kill_marked

_MARK = "LABKIT_BENCH"
# Time for a command to end its own processes after Ctrl-C; then they are killed.
_GRACE_S = 15.0
_KILLED_S = 10.0


@dataclass(frozen=True)
class Ended:
    """How a command has ended: its exit code, its seconds, and whether its time was up."""

    returncode: int
    seconds: float
    timed_out: bool


@contextlib.contextmanager
def as_ctrl_c() -> Iterator[None]:
    """Let a closed terminal and a polite end of the process do what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    old = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, old):
            signal.signal(number, handler)


def run_command(
    words: Sequence[str], log: Path, limit_s: float, cwd: Path, environment: dict[str, str]
) -> Ended:
    """Run a command to its end or its limit; all it prints goes to the file ``log``.

    However this ends, by Ctrl-C as well, no process that the command has started remains, nor
    its temporary files: all of them carry a mark in their environment, those with a session of
    their own (a notebook's kernel) too.
    """
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="lk-", ignore_cleanup_errors=True) as scratch:
        settings = os.environ | environment | {_MARK: mark, "TMPDIR": scratch}
        started_s = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        timed_out = False
        try:
            process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            try:
                # A command that still runs is interrupted first, and may end its own processes.
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_GRACE_S)
            finally:
                kill_marked(_MARK, mark, _KILLED_S, process.poll)
                process.wait()
        return Ended(process.returncode, time.perf_counter() - started_s, timed_out)
