"""The record of a run by labkit itself: ``train --record`` and ``labkit diff``.

One file, which rank 0 writes: the loss and the parameters of all ranks put together, after each
step. Format: ``labkit.training.recording``.
"""

from dataclasses import replace

import torch
from torch import Tensor

from labkit.collectives import naive_all_reduce
from labkit.strategies.base import Strategy
from labkit.training.config import RunConfig
from labkit.training.recording import VERSION, Entry, Header, Recorder, entry_of, random_checksum
from labkit.units import format_count


class RunRecord:
    """The record of a run in ``config.record``; every rank makes one, before the first step."""

    def __init__(self, config: RunConfig, strategy: Strategy):
        self.strategy = strategy
        self.comm = strategy.comm
        # What was computed in lower precision is no nearer than that.
        self.dtype = config.amp or config.dtype
        self.recorder: Recorder | None = None
        if config.record is not None and self.comm.rank == 0:
            ranks = format_count(config.world_size, "rank")
            layout = f"{config.technique_name} on {ranks}"
            header = Header(VERSION, 0, config.world_size, layout, True, config.shared())
            self.recorder = Recorder(config.record, header)
        self._write_parameters(0)
        self.random_state = random_checksum()

    def write_step(self, step: int, loss: Tensor, weight: Tensor) -> None:
        """Record a step by this rank's summed loss and its weight; a collective call."""
        drew = weight.new_tensor(self.random_state != random_checksum())
        self.random_state = random_checksum()
        sums = torch.stack([loss.to(weight), weight, drew])
        if self.comm.world_size > 1:
            naive_all_reduce(self.comm, sums)
        if self.recorder is not None:
            entry = entry_of(step, "loss", "loss", sums[0] / sums[1])
            self.recorder.write(replace(entry, dtype=self.dtype))
            if sums[2]:
                self.recorder.write(Entry(step, "random", "draws", [], "", 0.0, []))
        self._write_parameters(step)

    def _write_parameters(self, step: int) -> None:
        state = self.strategy.full_state()
        if self.recorder is None:
            return
        # The gradients of the last layer are complete first.
        for name in reversed(state):
            if state[name].is_floating_point():
                entry = entry_of(step, "parameter", name, state[name])
                self.recorder.write(replace(entry, dtype=self.dtype))

    def end(self) -> None:
        if self.recorder is not None:
            self.recorder.end()
