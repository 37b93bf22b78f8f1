"""The command ``labkit gpu-report``: run the steps in order, keep what has ended."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from labkit.gpus import num_gpus
from labkit.units import check_above_zero, check_choice, format_count
from workbook.measure.gpu_report.folder import (
    DONE,
    FAILED,
    NOT_REACHED,
    OUT_OF_TIME,
    SKIPPED,
    Folder,
    State,
)
from workbook.measure.gpu_report.page import write_page
from workbook.measure.gpu_report.steps import Step, all_steps, machine_key
from workbook.measure.processes import as_ctrl_c, run_command

DEFAULT_OUT, DEFAULT_MINUTES = "gpu-report", 30.0
_MOST_MINUTES = 24 * 60
# A step that has less time than this does not begin.
_LEAST_S = 15.0
# What a step plans to use of its time: the rest is for its start and its end.
_PLANNED = 0.75
_ENVIRONMENT = {"LABKIT_PROGRESS": "off", "LABKIT_TEST_GPUS": "1", "PYTHONUNBUFFERED": "1"}


def main(
    out: str = DEFAULT_OUT,
    minutes: float = DEFAULT_MINUTES,
    steps: Sequence[str] = (),
    quick: bool = False,
    root: Path | None = None,
) -> int:
    """Make or continue the report in the folder ``out``.

    Args:
        out: the folder; what an earlier call has finished there is kept if hardware, versions and
            code are the same.
        minutes: for everything; the most valuable steps come first.
        steps: names of some steps; all of them if none is given.
        quick: the least of every step, which says nothing about speed; for tests.
        root: the workbook's folder, with tests and notebooks; None if it is not there.

    Returns:
        The exit status: 0 if every step is done or cannot run here, 1 if one has failed or has
        not been reached, 130 after Ctrl-C.

    Raises:
        ValueError: before anything runs: no GPU, an impossible folder, unknown steps.
    """
    check_above_zero("--minutes", minutes, _MOST_MINUTES)
    if not num_gpus():
        raise ValueError(
            "gpu-report measures GPUs, and this machine has none that can be used: "
            "python -m labkit doctor says what is there; python -m labkit bench measures the CPU"
        )
    chosen = all_steps(root, num_gpus(), quick)
    for name in steps:
        check_choice("step", name, [step.name for step in chosen])
    chosen = [step for step in chosen if not steps or step.name in steps]
    folder = Folder(out)
    deadline_s = time.monotonic() + 60 * minutes
    report = Report(folder, chosen, root or folder.path, deadline_s, quick)
    with folder.in_use(), as_ctrl_c():
        return report.make()


@dataclass
class Report:
    """The steps of a report, run until ``deadline_s`` on the monotonic clock."""

    folder: Folder
    steps: list[Step]
    root: Path
    deadline_s: float
    quick: bool = False

    def make(self) -> int:
        """Run what is not done, and write the page; see ``main`` for the exit status."""
        machine = machine_key()
        self.keys = {step.name: step.key(machine) for step in self.steps}
        status = 0
        try:
            for step in self._to_run():
                self._run(step)
                self.write()
        except KeyboardInterrupt:
            status = 130
        states = self.write()
        open_steps = [one for one in states if one.status not in (DONE, SKIPPED)]
        print(f"\nthe page: {self.folder.path / 'index.html'}", flush=True)
        if open_steps:
            told = ", ".join(f"{one.name} ({one.status})" for one in open_steps)
            print(
                f"{format_count(len(open_steps), 'step')} open: {told}. The same command again "
                "keeps what is done and runs the others."
            )
        if status:
            print("labkit: stopped; no process of the report remains", file=sys.stderr)
        return status or int(bool(open_steps))

    def states(self) -> list[State]:
        """How every step stands, in order; results of other hardware or versions do not count."""
        found = []
        for step in self.steps:
            state = self._valid(step)
            if state is None and step.why_not:
                state = State(step.name, step.title, SKIPPED, told=step.why_not)
            found.append(state or State(step.name, step.title, NOT_REACHED))
        return found

    def write(self) -> list[State]:
        """Write the page as far as the report is; return the states."""
        states = self.states()
        write_page(self.folder, states, self.root, quick=self.quick)
        return states

    def _valid(self, step: Step) -> State | None:
        state = self.folder.state(step.name)
        return state if state and state.key == self.keys[step.name] else None

    def _to_run(self) -> list[Step]:
        """What is not done: first what has never ended, then what has failed."""
        open_steps = [step for step in self.steps if not step.why_not]
        states = {step.name: self._valid(step) for step in open_steps}
        kept = [name for name, state in states.items() if state and state.status == DONE]
        if kept:
            print(f"kept from an earlier call: {', '.join(kept)}", flush=True)
        never = [step for step in open_steps if states[step.name] is None]
        again = [step for step in open_steps if step not in never and step.name not in kept]
        # A step whose time was up may now take all that is left.
        return never + [replace(step, budget_s=math.inf) for step in again]

    def _run(self, step: Step) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s < _LEAST_S:
            return
        limit_s = min(step.budget_s, left_s)
        number = [one.name for one in self.steps].index(step.name) + 1
        print(f"[{number}/{len(self.steps)}] {step.title} ...", end=" ", flush=True)
        with self.folder.unfinished() as part:
            words = step.command(part, limit_s * _PLANNED)
            where = part / "log.txt", limit_s, self.root, _ENVIRONMENT
            ended = run_command(words, *where)
            told, status = "", DONE
            if ended.timed_out:
                told, status = f"stopped after its {limit_s:.0f} s", OUT_OF_TIME
            elif ended.returncode:
                told, status = _told(part / "log.txt", ended.returncode), FAILED
            now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
            key, seconds = self.keys[step.name], round(ended.seconds, 1)
            state = State(step.name, step.title, status, seconds, key, told, now)
            self.folder.keep(part, state)
        print(f"{status}, {ended.seconds:.0f} s" + (f": {told}" if told else ""), flush=True)


def _told(log: Path, returncode: int) -> str:
    """The line that says why a command has failed: labkit's own error, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    ours = [line for line in lines if line.startswith("labkit: ")]
    ended = f"ended by signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    return (ours[:1] or lines[-1:] or [ended])[0][:300]
