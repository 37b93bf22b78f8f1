"""How far a run is, on one rank: what the loop carries from step to step."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit import gpus
from labkit.strategies.base import Strategy
from labkit.training.evaluation import Row

# Messages and bytes; None if they are not counted.
Sent = tuple[int, int] | None


@dataclass
class Progress:
    """How far a run is, on one rank.

    Attributes:
        loss_sum: of this rank's losses in the epoch under way, float64 [1].
        epoch, step: complete epochs, and steps of the one under way.
        rows: of the complete epochs, see ``evaluation.row_of``, with ``seconds`` of training.
        seconds: of training in the epoch under way.
        sent: by this rank while it trained.
    """

    loss_sum: Tensor
    epoch: int = 0
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    sent: Sent = (0, 0)

    def resume_clock(self, strategy: Strategy) -> None:
        """Count time, messages and bytes from now on."""
        self._sent_before, self._since_s = strategy.sent(), now_s(strategy)

    def stop_clock(self, strategy: Strategy) -> None:
        """Add what was counted since ``resume_clock``."""
        self.seconds += now_s(strategy) - self._since_s
        self.sent = added(self.sent, self._sent_before, strategy.sent())

    def end_epoch(self, row: Row) -> None:
        """Begin the next epoch."""
        self.rows.append(row)
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, 0.0
        self.loss_sum = torch.zeros_like(self.loss_sum)


def now_s(strategy: Strategy) -> float:
    """The host's clock, when all that was queued on the strategy's devices has ended."""
    for device in {strategy.comm.device, *strategy.devices}:
        gpus.synchronize(device)
    return time.perf_counter()


def added(total: Sent, before: Sent, after: Sent) -> Sent:
    """``total`` plus what was sent between ``before`` and ``after``."""
    if total is None or before is None or after is None:
        return None
    return total[0] + after[0] - before[0], total[1] + after[1] - before[1]
