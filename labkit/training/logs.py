"""What a run writes into its ``log_dir`` while it goes on.

``epochs.csv`` has a row per epoch; ``rankR.log`` the settings, the epochs and what rank R printed,
and its traceback if it fails; TensorBoard draws the same numbers if it is installed. A log that
cannot be written never ends the training: that is said once.
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
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from labkit.comm.comm import Comm
from labkit.config import RunConfig
from labkit.errors import OutputError
from labkit.files import write_atomically
from labkit.training.evaluation import Row, told
from labkit.training.resume import agents as agents_of_run

_TABLE, _EVENTS = "epochs.csv", "events.out.tfevents.*"
# TensorBoard's names of an epoch's numbers.
_TAGS = {
    "loss": "loss/train",
    "test_loss": "loss/held_out",
    "train_accuracy": "accuracy/train",
    "test_accuracy": "accuracy/held_out",
    "test_top5": "accuracy/held_out_top5",
    "seconds": "seconds/epoch",
}
# Characters that a rank may print into its log, per line and in all, and those of a traceback.
_LONGEST_LINE, _MOST_PRINTED, _LONGEST_TRACEBACK = 10_000, 2_000_000, 100_000


def check_log_dir(
    folder: str, resumed: bool, rank: int | None = None, agents: Collection[str] = ()
) -> None:
    """Make the folder of a run's logs, and refuse one that has another run's.

    Args:
        folder: for the logs.
        resumed: whether the run continues one whose logs may be there.
        rank: look only at what this rank writes, since the others may have begun; None: at all.
        agents: those of torchrun whose ranks may have begun this run, too.

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
    names = [mine, *((_TABLE, _EVENTS) if rank in (None, 0) else ())]
    found = sorted(path.name for name in names for path in Path(folder).glob(name))
    if found and not resumed and not _have_written(agents, folder):
        raise ValueError(
            f"log_dir {folder} has the logs of another run ({found[0]}): give another folder, or "
            "continue that run with resume"
        )


def _have_written(agents: Collection[str], folder: str) -> bool:
    """Whether the logs there are of ranks that these agents have started."""
    for path in Path(folder).glob("rank[0-9]*.log"):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
            if any(agent in text for agent in agents):
                return True
    return False


class RunLogs:
    """The logs of one rank of a run; rank 0 also writes the table and TensorBoard's files.

    Args:
        comm: this rank's Comm.
        config: the settings; without a ``log_dir`` nothing is written.
    """

    def __init__(self, comm: Comm, config: RunConfig):
        self.folder = config.log_dir
        self._epochs = config.epochs
        self._writers: list[Table | Events] = []
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            # On another machine there is no launcher that has made it.
            os.makedirs(self.folder, exist_ok=True)
        self.log = RankLog(f"{self.folder}/rank{comm.rank}.log")
        self.log.line(
            f"rank {comm.rank} of {comm.world_size} on {socket.gethostname()}, process "
            f"{os.getpid()}, device {comm.device}, torch {torch.__version__}"
            + "".join(f", torchrun's agent {agent}" for agent in agents_of_run())
        )
        given = {k: v for k, v in config.as_dict().items() if v not in (None, False)}
        self.log.line(f"settings: {json.dumps(given)}")
        if comm.rank == 0:
            self._writers = [Table(f"{self.folder}/{_TABLE}"), Events(self.folder)]

    def add(self, epochs: list[Row]) -> None:
        """Take the last of all epochs so far, those before a resumption included."""
        if self.folder is not None:
            self.log.told(told(len(epochs) - 1, self._epochs, epochs[-1]))
        for writer in self._writers:
            writer.write(epochs)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self.log.close()


@contextlib.contextmanager
def run_logs(comm: Comm, config: RunConfig) -> Iterator[RunLogs]:
    """The logs of this rank; what is printed meanwhile, and an error, go to its log as well."""
    logs = RunLogs(comm, config)
    if logs.folder is None:
        yield logs
        return
    before = sys.stdout, sys.stderr
    copied = [Copied(stream, logs.log) for stream in before]
    sys.stdout, sys.stderr = copied
    end = "ended"
    try:
        yield logs
    except BaseException:
        end = traceback.format_exc()[-_LONGEST_TRACEBACK:].rstrip()
        raise
    finally:
        sys.stdout, sys.stderr = before
        for stream in copied:
            stream.end()
        logs.log.line(end)
        logs.close()


class _Once:
    """Says once that a log cannot be written."""

    def __init__(self, what: str):
        self.what = what
        self._said = False

    def say(self, why: object) -> None:
        if not self._said:
            self._said = True
            print(f"no {self.what}: {why}; the training goes on", file=sys.stderr)


class RankLog:
    """A file to which lines are added, each of them as soon as it is complete.

    Args:
        path: of the file; what it holds already stays.
    """

    def __init__(self, path: str):
        self._failed = _Once(f"log {path}")
        self._file: int | None = None
        self._told = ""
        self._left = _MOST_PRINTED
        # Whether the last line in the file was cut off.
        self._torn = False
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            self._failed.say(error.strerror)

    def line(self, text: str) -> None:
        """Add a line, with the time of day before it; further lines of ``text`` are indented."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        indented = "\n    ".join(text.splitlines())
        self._write(f"{now} {indented}\n")

    def told(self, text: str) -> None:
        """Add a line that the rank may be going to print, too."""
        self._told = text
        self.line(text)

    def printed(self, line: str) -> None:
        """Add a line that this rank has printed, unless that were too many."""
        if not line or line == self._told or self._left <= 0:
            return
        self._left -= len(line)
        self.line(f"| {line[:_LONGEST_LINE]}")
        if self._left <= 0:
            self.line(f"no more of what is printed, after {_MOST_PRINTED:,} characters")

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        data = ("\n" * self._torn + text).encode("utf-8", "backslashreplace")
        try:
            written = os.write(self._file, data)
        except OSError as error:
            self._failed.say(error.strerror)
            return
        self._torn = written < len(data)
        if self._torn:
            self._failed.say("the disk is full")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Copied:
    """A stream whose text is also added to a rank's log; all else is the stream's own.

    A line is added when it is complete; of a bar that is drawn with carriage returns, its end.
    """

    def __init__(self, stream: Any, log: RankLog):
        self._stream, self._log = stream, log
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if len(self._begun) > _LONGEST_LINE:
            lines, self._begun = [*lines, self._begun], ""
        for line in lines:
            self._log.printed(line.rstrip("\r").rpartition("\r")[2])
        return self._stream.write(text)

    def end(self) -> None:
        """Add the line that was begun."""
        self._log.printed(self._begun)
        self._begun = ""

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Table:
    """A CSV file with a row per epoch, whole at any time: it is replaced, not added to."""

    def __init__(self, path: str):
        self.path = path
        self._failed = _Once(path)

    def write(self, epochs: list[Row]) -> None:
        rows = [flat(row) for row in epochs]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, ["epoch", *columns], restval="", lineterminator="\n")
        table.writeheader()
        table.writerows({"epoch": number, **row} for number, row in enumerate(rows, start=1))
        try:
            write_atomically(self.path, text.getvalue())
        except (OutputError, ValueError) as error:
            self._failed.say(error)

    def close(self) -> None:
        """Nothing is open between two epochs."""


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """An epoch's numbers alone: ``KIND_s`` for each of ``phases_s``, "" where it is not finite."""
    numbers = {name: value for name, value in row.items() if name != "phases_s"}
    numbers |= {f"{kind}_s": s for kind, s in sorted(row.get("phases_s", {}).items())}
    return {name: value if _is_finite(value) else "" for name, value in numbers.items()}


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


class Events:
    """TensorBoard's files, one per start of the run; without TensorBoard it says how to get it."""

    def __init__(self, folder: str):
        self._failed = _Once("TensorBoard files")
        self._folder = folder
        self._writer: Any = None
        self._is_off = False

    def write(self, epochs: list[Row]) -> None:
        """Add the last epoch; the next one starts from there."""
        if self._is_off:
            return
        try:
            self._writer = self._writer or self._opened(len(epochs))
            for name, value in flat(epochs[-1]).items():
                tag = _TAGS.get(name, f"seconds/{name.removesuffix('_s')}")
                if value != "":
                    self._writer.add_scalar(tag, value, len(epochs))
            self._writer.flush()
        except ImportError as error:
            self._is_off = True
            how = "pip install tensorboard"
            self._failed.say(f"{how}, or labkit with its extra tensorboard ({error})")
        except Exception as error:
            # Any of its errors ends these files alone, and its thread.
            self._is_off = True
            self._failed.say(error)
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()

    def _opened(self, number: int) -> Any:
        # Not at the top: few runs need it. It takes a moment, and may not be installed.
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote about this epoch and later ones is not shown any more.
        return SummaryWriter(self._folder, purge_step=number)
