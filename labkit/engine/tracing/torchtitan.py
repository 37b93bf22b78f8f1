"""torchtitan's structured logs: JSON lines per rank, with the start and end of each phase.

The times are the host's: they do not divide ``fwd_bwd`` into computing, communication, waiting.

Source: torchtitan's ``observability/structured_logger`` (``log_trace_span``).
"""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

_STEP = "step"
_INPUT = "fetching_batch"
# A rank whose input takes this many times as long as the others' is named.
_SLOW = 1.25
_MENTIONED = 0.02


def explain_logs(contents: dict[Path, Any]) -> str:
    """Return which phase took most of the time in training steps, and which rank's input is slow.

    Raises:
        ValueError: a log has no training step, or two are of one rank or of different times.
    """
    by_rank: dict[int, dict[str, float]] = {}
    begun_us = {}
    ended_us = {}
    for path, records in contents.items():
        try:
            rank = int(records[0]["rank"])
            seconds = _seconds_by_phase(records)
            begun_us[path] = records[0]["time_us"]
            ended_us[path] = records[-1]["time_us"]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"cannot read {path} as torchtitan's log: {error!r}") from None
        if not sum(seconds.values()):
            raise ValueError(f"cannot judge {path}: it has no training step")
        if rank in by_rank:
            raise ValueError(f"{path} is of rank {rank} again: give one log per rank, of one run")
        by_rank[rank] = seconds
    latest = max(begun_us, key=begun_us.__getitem__)
    earliest = min(ended_us, key=ended_us.__getitem__)
    if begun_us[latest] > ended_us[earliest]:
        raise ValueError(f"{latest} begins after {earliest} has ended: give the logs of one run")
    shares: dict[str, float] = defaultdict(float)
    for seconds in by_rank.values():
        for phase, phase_s in seconds.items():
            shares[phase] += phase_s / sum(seconds.values()) / len(by_rank)
    largest, *smaller = sorted(shares, key=shares.__getitem__, reverse=True)
    limit = "Input" if largest == _INPUT else largest[0].upper() + largest[1:]
    text = f"{limit} limited the run: {largest} took {shares[largest]:.0%} of the time in steps."
    rest = [f"{phase} {shares[phase]:.0%}" for phase in smaller if shares[phase] > _MENTIONED]
    if rest:
        text += f" The rest: {', '.join(rest)}."
    input_s = {rank: seconds[_INPUT] for rank, seconds in by_rank.items()}
    slowest = max(input_s, key=input_s.__getitem__)
    usual_s = statistics.median([s for rank, s in input_s.items() if rank != slowest] or [0.0])
    if usual_s and input_s[slowest] > _SLOW * usual_s:
        times = input_s[slowest] / usual_s
        text += f" {_INPUT} took {times:.2g} times as long on rank {slowest} as on the others."
    if largest != _INPUT:
        text += " What of it is computing, communication or waiting, these logs do not show."
    return text


def _seconds_by_phase(records: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds within steps by the innermost phase at each moment."""
    seconds: dict[str, float] = defaultdict(float)
    # By task: the phases that have begun, the innermost last, and the time of the last record.
    begun: dict[Any, list[str]] = defaultdict(list)
    since_us: dict[Any, float] = {}
    for record in records:
        phase, _, edge = str(record["log_type_name"]).rpartition("_")
        if edge not in ("start", "end"):
            continue
        task = record.get("task_name")
        phases = begun[task]
        if _STEP in phases:
            innermost = "code between the phases" if phases[-1] == _STEP else phases[-1]
            seconds[innermost] += (record["time_us"] - since_us[task]) / 1e6
        since_us[task] = record["time_us"]
        if edge == "start":
            phases.append(phase)
        elif phase in phases:
            # A phase inside it that an error ended has no end record.
            del phases[phases.index(phase) :]
    return seconds
