"""Recorded runs on emulated devices, to change with ``labkit.what_if`` and to run as changed."""

from collections.abc import Mapping
from dataclasses import replace

import torch

import labkit
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.tracing import Trace
from workbook.measure import predicted

# The link of the recorded runs, and the slower one.
LINK = EmulatedLink(1e-3, 1e7)
SLOW_LINK = EmulatedLink(1e-2, 1e7)
_STEPS = 5


def recorded(
    name: str,
    ranks: int,
    link: EmulatedLink = LINK,
    stragglers: Mapping[int, float] | None = None,
) -> Trace:
    """Return the trace of a technique's steps on emulated devices, and of one that warms up."""
    slowdowns = stragglers or {}

    def train(comm: Comm) -> None:
        torch.set_num_threads(1)
        predicted.EmulatedBlock.slowdown = slowdowns.get(comm.rank, 1.0)
        predicted.steps_of(comm, name, ranks, _STEPS)

    result = labkit.run(train, world_size=ranks, link=link, device="cpu")
    about = {**result.trace.about, "strategy": name, "batch_size": predicted.SAMPLES}
    return replace(result.trace, about=about)
