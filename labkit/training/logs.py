"""What a run writes into its ``log_dir`` while it goes on.

``epochs.csv`` has a row per epoch; ``rankR.log`` the settings, the epochs and what rank R printed,
and its traceback if it fails; TensorBoard draws the same numbers if it is installed. A log that
cannot be written never ends the training: that is said once. No file is opened through a link.
"""

import contextlib
import csv
import io
import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from labkit.comm.comm import Comm
from labkit.config import RunConfig
from labkit.files import write_private
from labkit.training.evaluation import Row, epoch_line

_TABLE, _EVENTS = "epochs.csv", "TensorBoard files"
# TensorBoard's names of an epoch's numbers.
_TAGS = {
    "loss": "loss/train",
    "test_loss": "loss/held_out",
    "train_accuracy": "accuracy/train",
    "test_accuracy": "accuracy/held_out",
    "test_top5": "accuracy/held_out_top5",
    "seconds": "seconds/epoch",
}
# Characters that a rank may print into its log.
_MOST_PRINTED = 2_000_000


def check_log_dir(folder: str, resumed: bool, rank: int | None = None) -> None:
    """Make the folder of a run's logs, and refuse one that has another run's.

    Args:
        folder: for the logs.
        resumed: whether the run continues one whose logs may be there.
        rank: look only at what this rank writes, since the others may have begun; None: at all.

    Raises:
        ValueError: logs of another run, or a folder that cannot be made or written.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make log_dir {folder!r}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to log_dir {folder}: no permission")
    mine = "rank[0-9]*.log" if rank is None else f"rank{rank}.log"
    names = [mine, *((_TABLE, "events.out.tfevents.*") if rank in (None, 0) else ())]
    found = sorted(path.name for name in names for path in Path(folder).glob(name))
    if found and not resumed:
        raise ValueError(
            f"log_dir {folder} has the logs of another run ({found[0]}): give another folder, or "
            "continue that run with resume"
        )


class RunLogs:
    """The logs of one rank of a run; rank 0 also writes the table and TensorBoard's files.

    Args:
        comm: this rank's Comm.
        config: the settings; without a ``log_dir`` nothing is written.
    """

    def __init__(self, comm: Comm, config: RunConfig):
        self.folder, self.epochs, self.is_first = config.log_dir, config.epochs, comm.rank == 0
        self._failed: set[str] = set()
        self._file: int | None = None
        self._printed, self._last = 0, ""
        self._events: Any = None
        if self.folder is None:
            return
        path = f"{self.folder}/rank{comm.rank}.log"
        # Never through a link, which another user could have put there; nor into a pipe.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with self._may_fail(f"log {path}"):
            # On another machine there is no launcher that has made it.
            os.makedirs(self.folder, exist_ok=True)
            self._file = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        self.line(
            f"rank {comm.rank} of {comm.world_size} on {socket.gethostname()}, process "
            f"{os.getpid()}, device {comm.device}, torch {torch.__version__}"
        )
        given = {k: v for k, v in config.as_dict().items() if v not in (None, False)}
        self.line(f"settings: {json.dumps(given)}")

    def line(self, text: str) -> None:
        """Add a line, with the time of day before it; further lines of ``text`` are indented."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        indented = "\n    ".join(text.splitlines())
        if self._file is not None:
            with self._may_fail(f"log of this rank in {self.folder}"):
                os.write(self._file, f"{now} {indented}\n".encode("utf-8", "backslashreplace"))

    def printed(self, line: str) -> None:
        """Add a line that this rank has printed, unless that were too many."""
        # Of a bar that is drawn with carriage returns, its end; a line of an epoch is there.
        line = line.rstrip("\r").rpartition("\r")[2]
        if line and line != self._last and self._printed < _MOST_PRINTED:
            self._printed += len(line)
            self.line(f"| {line}")
            if self._printed >= _MOST_PRINTED:
                self.line(f"no more of what is printed, after {_MOST_PRINTED:,} characters")

    def add(self, epochs: list[Row]) -> None:
        """Take the last of all epochs so far, those before a resumption included."""
        if self.folder is None:
            return
        self._last = epoch_line(len(epochs) - 1, self.epochs, epochs[-1])
        self.line(self._last)
        if not self.is_first:
            return
        rows = [flat(row) for row in epochs]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, ["epoch", *columns], restval="", lineterminator="\n")
        table.writeheader()
        table.writerows({"epoch": number, **row} for number, row in enumerate(rows, start=1))
        with self._may_fail(_TABLE):
            # Whole at any time: it is replaced, not added to.
            write_private(f"{self.folder}/{_TABLE}", [text.getvalue().encode()])
            os.chmod(f"{self.folder}/{_TABLE}", 0o644)
        if _EVENTS in self._failed:
            return
        with self._may_fail(_EVENTS):
            # Not at the top: few runs need it. It takes a moment, and may not be installed.
            from torch.utils.tensorboard import SummaryWriter

            if self._events is None:
                # What an interrupted run wrote about later epochs is not shown any more.
                self._events = SummaryWriter(self.folder, purge_step=len(epochs))
            for name, value in rows[-1].items():
                tag = _TAGS.get(name, f"seconds/{name.removesuffix('_s')}")
                if value != "":
                    self._events.add_scalar(tag, value, len(epochs))
            self._events.flush()

    def close(self) -> None:
        # Its thread ends with an error, and would never read what is still to be written.
        if self._events is not None and _EVENTS not in self._failed:
            with self._may_fail(_EVENTS):
                self._events.close()
        if self._file is not None:
            os.close(self._file)

    @contextlib.contextmanager
    def _may_fail(self, what: str) -> Iterator[None]:
        """Skip a block that has failed before; say it when it fails for the first time."""
        try:
            yield
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                why = getattr(error, "strerror", None) or error
                is_missing = isinstance(error, ImportError)
                how = " (pip install tensorboard)" if is_missing else ""
                print(f"no {what}: {why}{how}; the training goes on", file=sys.stderr)


@contextlib.contextmanager
def run_logs(comm: Comm, config: RunConfig) -> Iterator[RunLogs]:
    """The logs of this rank; what is printed meanwhile, and an error, go to its log as well."""
    logs = RunLogs(comm, config)
    if logs.folder is None:
        yield logs
        return
    before = sys.stdout, sys.stderr
    copied = [Copied(stream, logs.printed) for stream in before]
    sys.stdout, sys.stderr = copied
    end = "ended"
    try:
        yield logs
    except BaseException:
        end = traceback.format_exc().rstrip()
        raise
    finally:
        sys.stdout, sys.stderr = before
        for stream in copied:
            stream.write_rest()
        logs.line(end)
        logs.close()


class Copied:
    """A stream whose complete lines are also given to ``add``; all else is the stream's own."""

    def __init__(self, stream: Any, add: Callable[[str], None]):
        self._stream, self._add, self._begun = stream, add, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._add(line)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def write_rest(self) -> None:
        self._add(self._begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """An epoch's numbers alone: ``KIND_s`` for each of ``phases_s``, "" where it is not finite."""
    numbers = {name: value for name, value in row.items() if name != "phases_s"}
    numbers |= {f"{kind}_s": s for kind, s in sorted(row.get("phases_s", {}).items())}
    is_number = {n: value is not None and math.isfinite(value) for n, value in numbers.items()}
    return {name: value if is_number[name] else "" for name, value in numbers.items()}
