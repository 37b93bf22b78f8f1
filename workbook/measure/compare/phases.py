"""The time of each epoch by kind of span and role of the rank, read from a run's trace."""

import itertools
import math
from collections.abc import Iterable, Sequence

from labkit.tracing import Span, Trace


def epochs_by_role(
    trace: Trace, seconds: Sequence[float]
) -> dict[str, list[dict[str, float | None]]]:
    """``{role: [{kind of span: seconds} of each epoch]}``, means over the ranks of a role.

    A ``worker`` computes a share of the batch, a ``stage`` a part of the model, a ``server``
    nothing. Evaluation is outside the epochs.

    Args:
        trace: of the run.
        seconds: of each epoch. Where ranks do not wait for each other, these are the epochs of the
            server, and what any rank does in this time counts.
    """
    windows = {rank: epoch_windows(trace.of(rank)) for rank in trace.ranks}
    if any(len(found) != len(seconds) for found in windows.values()):
        start_s = min(found[0][0] for found in windows.values() if found)
        ends_s = list(itertools.accumulate(seconds, initial=start_s))
        windows = {rank: list(itertools.pairwise(ends_s)) for rank in windows}
    by_role: dict[str, list[list[dict[str, float]]]] = {}
    for rank, bounds in windows.items():
        own = Trace(tuple(trace.of(rank)))
        # From all spans of the rank: a rank that is late may do nothing in one epoch of others.
        kinds = {span.kind for span in own.spans}
        role = "stage" if kinds & {"forward", "backward"} else "server"
        role = "worker" if "compute" in kinds else role
        epochs = [own.between(*bound).seconds_by_kind() for bound in bounds]
        by_role.setdefault(role, []).append(epochs)
    return {
        role: [_means(rows) for rows in zip(*ranks)]
        for role, ranks in sorted(by_role.items(), reverse=True)
    }


def epoch_windows(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """(start, end) of each stretch of training in one rank's spans, in the order of time.

    A stretch begins with the data of a batch (on a server, which loads no data, with any span) and
    ends where an evaluation begins, or with the last span.
    """
    spans = list(spans)
    opens = {"data"} & {span.kind for span in spans} or {span.kind for span in spans}
    windows, start_s = [], None
    for span in spans:
        if span.kind == "evaluate":
            windows += [] if start_s is None else [(start_s, span.start_s)]
            start_s = None
        elif start_s is None and span.kind in opens:
            start_s = span.start_s
    if start_s is not None:
        windows.append((start_s, max(span.end_s for span in spans)))
    return windows


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float | None]:
    kinds = sorted({kind for row in rows for kind in row})
    return {kind: short(sum(row.get(kind, 0.0) for row in rows) / len(rows)) for kind in kinds}


def short(value: float) -> float | None:
    """Round to six significant digits, since more are noise; None for NaN and infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
