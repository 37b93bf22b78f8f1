"""``labkit.what_if`` beside runs: one recorded run of each technique, and the same run changed.

``python -m workbook.measure.changed --json FILE`` plays emulated devices (``predicted``): a run is
recorded, predicted under another link, straggler or number of ranks, and then run like that.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import labkit
from labkit import strategies
from labkit.costs.what_if import step_seconds
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.files import check_writable
from labkit.engine.tracing import Trace
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.ddp import NaiveDDP
from labkit.strategies.on_shares import OnShares
from labkit.units import check_integer, format_seconds
from workbook.measure import predicted
from workbook.measure.record import Table, machine, write

# The link of the recorded runs, and the slower one.
LINK = EmulatedLink(1e-3, 1e7)
SLOW_LINK = EmulatedLink(1e-2, 1e7)


class NaiveReplicas(OnShares):
    """Data parallelism whose gradients are all-reduced one by one, after backward."""

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().setup(comm, model, make_optimizer)
        replica = NaiveDDP(comm, self.model, op="sum")
        self.module = replica
        self.no_sync = replica.no_sync


@dataclass(frozen=True)
class Change:
    """A technique on some ranks, and what is changed: the arguments of ``labkit.what_if``.

    ``link`` is that of the recorded run; None: the memory that its ranks share.
    """

    technique: str
    ranks: int
    change: dict[str, Any]
    link: EmulatedLink | None = LINK


CHANGES = (
    Change("ring_all_reduce", 4, {"link": SLOW_LINK}),
    Change("ring_all_reduce", 2, {"ranks": 4}),
    Change("naive DDP", 3, {"link": SLOW_LINK}),
    Change("ddp", 4, {"link": SLOW_LINK}),
    Change("ddp", 3, {"stragglers": {1: 2.0}}),
    Change("ddp", 2, {"ranks": 3}),
    Change("pipeline gpipe", 4, {"link": SLOW_LINK}),
    Change("pipeline 1f1b", 4, {"stragglers": {2: 2.0}}),
    Change("model_parallel", 3, {"stragglers": {1: 4.0}}),
    Change("parameter_server", 3, {"link": SLOW_LINK}),
    Change("parameter_server", 4, {"stragglers": {2: 4.0}}),
    Change("sharded", 3, {"link": SLOW_LINK}),
    Change("pipeline zero_bubble", 4, {"link": SLOW_LINK}),
    Change("tensor_parallel", 2, {"link": SLOW_LINK}),
    Change("ring_all_reduce", 3, {"link": SLOW_LINK}, link=None),
    Change("ddp", 3, {"link": LINK}, link=None),
)


def technique_of(name: str, ranks: int) -> Strategy:
    """The technique as it runs on so many emulated devices."""
    if name == "naive DDP":
        return NaiveReplicas()
    name, _, schedule = name.partition(" ")
    options = predicted.options_of(name, ranks)
    if schedule:
        options["schedule"] = schedule
    return strategies.get(name)(**options)


def recorded(
    name: str,
    ranks: int,
    link: EmulatedLink | None = LINK,
    stragglers: Mapping[int, float] | None = None,
    repeats: int = 5,
) -> Trace:
    """The trace of ``repeats`` steps on emulated devices, and of one before that warms up."""
    slowdowns = stragglers or {}

    def train(comm: Comm) -> None:
        torch.set_num_threads(1)
        predicted.EmulatedBlock.slowdown = slowdowns.get(comm.rank, 1.0)
        predicted.steps_of(comm, technique_of(name, ranks), repeats)

    result = labkit.run(train, world_size=ranks, link=link, device="cpu")
    about = {**result.trace.about, "strategy": name, "batch_size": predicted.SAMPLES}
    return replace(result.trace, about=about)


def measure(change: Change, repeats: int) -> dict[str, Any]:
    """Record, predict and run one change; seconds of a step."""
    before = recorded(change.technique, change.ranks, change.link, repeats=repeats)
    prediction = labkit.what_if(before, **change.change)
    conditions: dict[str, Any] = {"ranks": change.ranks, "link": change.link} | change.change
    after = recorded(change.technique, repeats=repeats, **conditions)
    words = f"{change.technique}, {change.ranks} ranks, {prediction.conditions}"
    if change.link is None:
        words += " (recorded without a link)"
    return {
        "change": words,
        "recorded_s": prediction.recorded_s,
        "predicted_s": prediction.predicted_s,
        "run_s": step_seconds(after),
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The recorded step, and the changed one as predicted and as run."""
    cells = []
    num_close = 0
    for row in rows:
        error = row["predicted_s"] / row["run_s"] - 1
        num_close += abs(error) <= predicted.CLOSE
        names = ("recorded_s", "predicted_s", "run_s")
        times = [format_seconds(row[name]) for name in names]
        cells.append((row["change"], *times, f"{error:+.0%}"))
    heads = ("change", "step (recorded)", "changed (predicted)", "changed (run)", "error")
    note = f"{num_close} of {len(rows)} within {predicted.CLOSE:.0%}."
    return Table(heads, tuple(cells), (note,))


def main() -> None:
    """Measure all changes, print them, and record them."""
    parser = argparse.ArgumentParser(description="predictions of labkit.what_if beside runs")
    parser.add_argument("--json", metavar="FILE", help="record them")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="steps of a run (7)")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    check_integer("repeats", arguments.repeats, least=3)
    rows = []
    for change in CHANGES:
        rows.append(measure(change, arguments.repeats))
        print(table_of(rows[-1:]).rows[0], flush=True)
    print(table_of(rows))
    command = shlex.join(["python", "-m", "workbook.measure.changed", *sys.argv[1:]])
    write({"command": command, "rows": rows} | machine(), arguments.json, {})


if __name__ == "__main__":
    main()
