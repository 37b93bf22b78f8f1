"""Make the README's picture: one real training step on four ranks, with a record of the run.

Writes data/results/ring_step.png and data/results/ring_step.json.
"""

import json
from pathlib import Path

from labkit import plots, train_with
from labkit.files import write_atomically
from labkit.trace import Trace

RESULTS = Path(__file__).resolve().parents[1] / "data" / "results"
# The first steps warm up the caches; the last one of an epoch has a smaller batch.
STEP = 20


def main() -> None:
    result = train_with("ring_all_reduce", world_size=4, epochs=1, batch_size=64)
    start_s, end_s = step_bounds(result.trace, STEP)
    figure = plots.timeline(
        result,
        title="One training step on four ranks, as measured",
        start_s=start_s,
        end_s=end_s,
    )
    RESULTS.mkdir(exist_ok=True)
    figure.save(RESULTS / "ring_step.png")
    record = {
        "command": "python tools/readme_picture.py",
        "config": result.config.as_dict(),
        "step": STEP,
        "step_seconds": end_s - start_s,
        "hardware": result.hardware,
        "versions": result.versions,
    }
    write_atomically(RESULTS / "ring_step.json", json.dumps(record, indent=2) + "\n")
    print(figure.caption)


def step_bounds(trace: Trace, step: int) -> tuple[float, float]:
    """(start, end) of a step: its earliest start on a rank, and the latest start of the next."""
    starts, ends = [], []
    for rank in trace.ranks:
        data = trace.of(rank, "data")
        starts.append(data[step].start_s)
        ends.append(data[step + 1].start_s)
    return min(starts), max(ends)


if __name__ == "__main__":
    main()
