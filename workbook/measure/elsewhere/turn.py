"""What one contender has done in its turn, and how a turn that failed is told."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MOST_LETTERS = 300
# "ValueError: ...", also behind a rank or a time; not the summaries of launchers.
_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|Interrupt)\b(?:: .*)?$|can't open file .*")
_SUMMARY = re.compile(r"ChildFailedError|SignalException|traceback :|Traceback")


class TurnError(RuntimeError):
    """A contender has failed; the message says how."""


@dataclass(frozen=True)
class Turn:
    """A training run of one contender.

    Attributes:
        losses: of every step, the mean of the global batch before the update.
        step_s: seconds of every step, on worker 0.
        sent_bytes: {process: bytes of every step}, counted by the kernel.
        counted_bytes: the same, counted by labkit; None where labkit does not send.
        versions: of what took part.
    """

    losses: list[float]
    step_s: list[float]
    sent_bytes: dict[str, list[int]]
    counted_bytes: dict[str, list[int]] | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, reports: Iterable[dict[str, Any]], steps: int) -> "Turn":
        """The turn that these processes' reports tell; losses and seconds are worker 0's.

        Raises:
            TurnError: a report is missing, or does not have a number for every step.
        """
        told = {report["worker"]: report for report in reports}
        if 0 not in told:
            raise TurnError("worker 0 has not reported")
        first, sent, counted = told[0], {}, {}
        for _, report in sorted(told.items()):
            sent |= report["sent_bytes"]
            counted |= report.get("counted_bytes", {})
        each = {"losses": first["losses"], "seconds": first["step_s"]} | sent | counted
        for name, numbers in each.items():
            if len(numbers) != steps:
                raise TurnError(f"{name}: {len(numbers)} numbers for {steps} steps")
        return cls(first["losses"], first["step_s"], sent, counted or None, first["versions"])


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """What ``report`` has written into a folder, as ``report.json`` and ``report.json.N``.

    Raises:
        TurnError: a file is not a report.
    """
    found = []
    for path in folder.glob("report.json*"):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise TurnError(f"{path.name} is not a report: {error}") from None
    return found


def reason_in(log: str) -> str:
    """The line of a failed program's output that says most: its first error, or its last line."""
    lines = [line.strip() for line in log.splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if _ERROR.search(line) and not _SUMMARY.search(line)]
    # Of a chain of errors the first is the cause, and what follows comes of it.
    said = (errors or lines[-1:] or ["without a word"])[0]
    found = _ERROR.search(said)
    return (found.group(0) if errors and found else said)[:_MOST_LETTERS]
