"""How far a run is, on one rank: what the loop carries from step to step."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit import gpus
from labkit.strategies.base import Strategy
from labkit.training.evaluation import Row, Seconds, spent_since

# Messages and bytes; None if they are not counted.
Sent = tuple[int, int] | None


@dataclass
class Progress:
    """How far a run is, on one rank. Sums over an epoch are of the one under way.

    Attributes:
        epoch, step: complete epochs, and steps of the one under way.
        rows: of the complete epochs, see ``evaluation.row_of``.
        loss_sum: of this rank's losses in the epoch, float64 [1].
        finite: after how many of the epoch's steps ``loss_sum`` was finite, float64 [1].
        trained: this rank's right predictions in the epoch and of how many, float64 [2].
        seconds, spent_s: of training in the epoch, and by kind of span.
        sent: by this rank while it trained, in all epochs.
    """

    loss_sum: Tensor
    finite: Tensor
    trained: Tensor
    epoch: int = 0
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    spent_s: Seconds = field(default_factory=dict)
    sent: Sent = (0, 0)

    @classmethod
    def none(cls, device: torch.device) -> "Progress":
        """That of a run that begins."""
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        return cls(sums[:1], sums[1:2], sums[2:])

    def start_clock(self, strategy: Strategy) -> None:
        """Count time, messages and bytes from now on."""
        self._spent_before = spent_since({}, strategy)
        self._sent_before, self._since_s = strategy.sent(), now_s(strategy)

    def stop_clock(self, strategy: Strategy) -> None:
        """Add what was counted since ``start_clock``, and the right predictions."""
        self.seconds += now_s(strategy) - self._since_s
        self.sent = added(self.sent, self._sent_before, strategy.sent())
        for kind, seconds in spent_since(self._spent_before, strategy).items():
            self.spent_s[kind] = self.spent_s.get(kind, 0.0) + seconds
        self.trained += strategy.counted()

    def end_step(self, loss: Tensor) -> None:
        """Count a step; nothing waits for a GPU."""
        self.step += 1
        self.loss_sum += loss
        self.finite += self.loss_sum.isfinite()

    def end_epoch(self, row: Row) -> None:
        """Begin the next epoch."""
        self.rows.append(row)
        self.epoch, self.step, self.seconds, self.spent_s = self.epoch + 1, 0, 0.0, {}
        for sums in (self.loss_sum, self.finite, self.trained):
            sums.zero_()

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank."""
        sums = {"loss_sum": self.loss_sum.tolist(), "trained": self.trained.tolist()}
        return sums | {"seconds": self.seconds, "spent_s": self.spent_s, "sent": self.sent}

    def add(self, numbers: dict[str, Any]) -> None:
        """Add what a rank had counted."""
        self.loss_sum += self.loss_sum.new_tensor(numbers["loss_sum"])
        self.trained += self.trained.new_tensor(numbers["trained"])
        self.seconds = max(self.seconds, numbers["seconds"])
        self.spent_s = numbers["spent_s"]


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
