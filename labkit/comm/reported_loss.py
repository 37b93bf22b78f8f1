"""The loss that a rank reports while it trains, on its way to the status board."""

import time
from typing import Any

import torch
from torch import Tensor

_EVERY_S = 0.25


class ReportedLoss:
    """Writes losses to a rank's row of the board; a loss on a GPU, without waiting for it."""

    def __init__(self, row: Any):
        self._row = row
        self._fetched_s = -_EVERY_S
        # A loss on its way from a GPU, and the event of its arrival.
        self._coming: tuple[Tensor, torch.Event] | None = None

    def report(self, loss: Tensor | float) -> None:
        """Write ``loss``; from a GPU when it has come, at most 4 times a second."""
        if not (isinstance(loss, Tensor) and loss.device.type == "cuda"):
            self._row["loss"] = float(loss)
            return
        if self._coming is not None and self._coming[1].query():
            self._row["loss"] = float(self._coming[0])
            self._coming = None
        now_s = time.perf_counter()
        if self._coming is None and now_s - self._fetched_s > _EVERY_S:
            self._fetched_s = now_s
            # Into pinned memory: the host goes on, and looks at it in a later step.
            landing = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
            landing.copy_(loss.detach(), non_blocking=True)
            self._coming = landing, torch.cuda.current_stream(loss.device).record_event()
