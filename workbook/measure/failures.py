"""Training while hosts fail on a schedule: what each rank did when, and how much of it counted.

Agents of ``torchrun`` play the hosts (``workbook.agents``), and their ranks run
``exercises/programs/faulty_hosts.py``. A fault meets all ranks of a host at once:

    kill    SIGKILL: as if the power had failed
    stop    SIGSTOP for a while: the processes are there, and do nothing
    cut     the host's ranks go on, but send nothing for a while; without root there is no cable to
            pull, so each sleeps before its next message
"""

import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.engine.files import write_atomically
from labkit.engine.tracing import Span
from labkit.units import MOST_SECONDS, check_choice, check_integer, check_number
from workbook.agents import start_agents
from workbook.exercises.programs import faulty_hosts
from workbook.exercises.programs.faulty_hosts import Settings

HOSTS = 2
RANKS_PER_HOST = 2
_RANKS = HOSTS * RANKS_PER_HOST
# For the agents to start, and for recoveries that take longer than they should.
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Fault:
    """A fault of a host: ``kind`` is kill, stop or cut.

    ``at_s`` counts from the first step; until training goes on after the fault before it, a fault
    is put off. A stop or a cut ends after ``lasts_s``.
    """

    kind: str
    host: int
    at_s: float
    lasts_s: float = 0.7

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("kill", "stop", "cut"))
        check_integer("host", self.host, 0, HOSTS - 1)
        check_number("at_s", self.at_s, MOST_SECONDS)
        check_number("lasts_s", self.lasts_s, _LIMIT_S)

    @property
    def ranks(self) -> range:
        """The ranks of its host."""
        return range(self.host * RANKS_PER_HOST, (self.host + 1) * RANKS_PER_HOST)


@dataclass(frozen=True)
class FaultyRun:
    """Record of a run with faults; seconds count from its first step.

    Attributes:
        faults: those that came before its end, when they came.
        spans: what each rank did, of the kinds train, run again, checkpoint, recover, down, wait.
        num_failures: how often all ranks were started anew; a fault that nobody lost patience
            over is no failure.
        losses: step -> the loss, each time that it was run.
        step_s: the median of the steps.
        duration_s: until the end of the last step.
    """

    faults: Sequence[Fault]
    spans: Sequence[Span]
    num_failures: int
    losses: dict[int, list[float]]
    step_s: float
    duration_s: float

    @property
    def useful_s(self) -> float:
        """The time of the steps that count: each once, however often it was run."""
        return len(self.losses) * self.step_s

    @property
    def goodput(self) -> float:
        """Useful steps / the steps for which there would have been time.

        There are neither faults nor checkpoints in that time.
        """
        return self.useful_s / self.duration_s

    @property
    def between_failures_s(self) -> float:
        """Seconds between failures on average; infinite without any."""
        if self.num_failures == 0:
            return math.inf
        return self.duration_s / self.num_failures


def train_with_faults(faults: Sequence[Fault], settings: Settings | None = None) -> FaultyRun:
    """Train while hosts fail, on two hosts of two ranks; takes ``duration_s`` and a few seconds.

    Raises:
        ValueError: two faults are so close that the second would meet a recovery, or one lasts
            longer than that.
        RuntimeError: training did not come to its end.
    """
    settings = settings or Settings()
    faults = sorted(faults, key=lambda fault: fault.at_s)
    for fault in faults:
        if fault.kind != "kill" and fault.lasts_s >= settings.recovery_s:
            raise ValueError(
                f"the {fault.kind} at {fault.at_s:g} s lasts {fault.lasts_s:g} s, and a recovery "
                f"from it would begin before its end: take less than {settings.recovery_s:g} s"
            )
    for before, after in itertools.pairwise(faults):
        if after.at_s < before.at_s + settings.recovery_s:
            raise ValueError(
                f"faults at {before.at_s:g} and {after.at_s:g} s: the second would meet the "
                f"recovery from the first, which takes {settings.recovery_s:g} s: move it"
            )
    with tempfile.TemporaryDirectory(prefix="labkit-faults-") as name:
        folder = Path(name)
        program = [faulty_hosts.__file__, folder, json.dumps(asdict(settings))]
        is_over = threading.Event()
        injected: list[Fault] = []
        work = (faults, folder, is_over, injected)
        injector = threading.Thread(target=_inject, args=work, daemon=True)
        with start_agents(
            program,
            hosts=HOSTS,
            ranks_per_host=RANKS_PER_HOST,
            forked=True,
            options=["--max-restarts", "99"],
        ) as agents:
            lines: list[str] = []
            limit_s = settings.duration_s + _LIMIT_S
            injector.start()
            try:
                has_ended = agents.follow(limit_s, show=lambda host, line: lines.append(line))
            finally:
                is_over.set()
                injector.join()
        events = _read_events(folder)
        begun_s = faulty_hosts.read_moment(folder / "begun")
        ends_s = [event["end_s"] - begun_s for event in events[0] if event["kind"] == "step"]
        if not has_ended or not all(events) or max(ends_s, default=0.0) < settings.duration_s:
            last = "\n".join(lines[-5:])
            raise RuntimeError(f"training with faults did not come to its end:\n{last}")
        return result_of(injected, events, begun_s)


def _inject(
    faults: Sequence[Fault], folder: Path, is_over: threading.Event, injected: list[Fault]
) -> None:
    """Let each fault happen at its time after the first step, and note when it did."""
    begun = folder / "begun"
    while not begun.exists():
        if is_over.wait(0.01):
            return
    begun_s = faulty_hosts.read_moment(begun)
    harmed_until_s = begun_s
    for fault in faults:
        if is_over.wait(max(0.0, begun_s + fault.at_s - time.monotonic())):
            return
        # On a busy machine a recovery may take longer than it should.
        while not _has_step_since(harmed_until_s, folder):
            if is_over.wait(0.02):
                return
        now_s = time.monotonic()
        injected.append(replace(fault, at_s=now_s - begun_s))
        harmed_until_s = now_s
        if fault.kind != "kill":
            harmed_until_s += fault.lasts_s
        write_atomically(folder / "fault", repr(now_s).encode())
        if fault.kind == "cut":
            write_atomically(folder / f"cut-{fault.host}", repr(now_s + fault.lasts_s).encode())
        elif fault.kind == "kill":
            _signal_ranks(fault, folder, signal.SIGKILL)
        else:
            _signal_ranks(fault, folder, signal.SIGSTOP)
            is_over.wait(fault.lasts_s)
            _signal_ranks(fault, folder, signal.SIGCONT)


def _has_step_since(moment_s: float, folder: Path) -> bool:
    """True if rank 0 has begun a step after this moment, and ended it."""
    noted = _read_events(folder)[0]
    return any(event["kind"] == "step" and event["start_s"] >= moment_s for event in noted)


def _signal_ranks(fault: Fault, folder: Path, number: int) -> None:
    events = _read_events(folder)
    for rank in fault.ranks:
        pids = [event["pid"] for event in events[rank] if event["kind"] == "process"]
        # It may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[-1], number)


def _read_events(folder: Path) -> list[list[dict[str, Any]]]:
    """Return by rank what it has noted, in the order of time; a line that was cut is left out."""
    events = []
    for rank in range(_RANKS):
        path = folder / f"events-{rank}"
        lines = []
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
        events.append([json.loads(line) for line in lines if line.endswith("\n")])
    return events


def result_of(
    faults: Sequence[Fault], events: list[list[dict[str, Any]]], begun_s: float
) -> FaultyRun:
    """Return what the ranks have noted, by rank in the order of time, as a run."""
    losses: dict[int, list[float]] = {}
    seconds = []
    for event in events[0]:
        if event["kind"] == "step":
            losses.setdefault(event["step"], []).append(event["loss"])
            seconds.append(event["end_s"] - event["start_s"])
    end_s = max(event["end_s"] for event in events[0] if event["kind"] == "step")
    met = [fault for fault in faults if fault.at_s < end_s - begun_s]
    num_failures = sum(event["kind"] == "process" for event in events[0]) - 1
    spans = []
    for rank, noted in enumerate(events):
        spans += _spans_of(rank, noted, met, begun_s)
    step_s = statistics.median(seconds)
    return FaultyRun(met, spans, num_failures, losses, step_s, end_s - begun_s)


def _spans_of(
    rank: int, noted: list[dict[str, Any]], faults: Sequence[Fault], begun_s: float
) -> list[Span]:
    """Spans of one rank: what it noted, and in the gaps that faults left, down or wait."""
    spans: list[Span] = []
    done: set[int] = set()
    for event in noted:
        kind = event["kind"]
        if kind == "step":
            kind = "train"
            if event["step"] in done:
                kind = "run again"
            done.add(event["step"])
        start_s = event["start_s"] - begun_s
        end_s = event["end_s"] - begun_s
        if end_s <= 0:
            continue
        if kind == "process":
            gap = "wait"
            earlier = [fault for fault in faults if fault.at_s < start_s]
            if earlier and rank in earlier[-1].ranks:
                gap = "down"
            gap_start_s = spans[-1].end_s if spans else 0.0
            spans.append(Span(rank, gap, gap_start_s, start_s))
            kind = "recover"
        if spans and spans[-1].kind == kind:
            start_s = spans.pop().start_s
        spans.append(Span(rank, kind, start_s, end_s))
    return spans
