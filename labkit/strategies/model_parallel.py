"""Model parallelism by placement: the model is cut into stages, and each rank holds one.

The batch passes through the stages one after another, forward and then backward:

    stage 0   F . . . . B
    stage 1   . F . . B .
    stage 2   . . F B . .

A rank needs memory only for its own stage: that is the purpose of the technique. While one stage
works, all others wait, so the technique is no faster than one device; ``pipeline`` improves on
that. ``model_parallel_one_process`` does the same in one process, on the devices of one machine.

Source: the manual placement that PyTorch's tutorials call model parallelism, here with one
process per device.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from labkit.schedules.pipeline import Hop, Message
from labkit.strategies.stage import ONE_AT_A_TIME, StagedModel
from labkit.units import check_integer


@dataclass(eq=False)
class ModelParallel(StagedModel):
    """Rank s holds the layers from split point s to the next one.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    Parameters may be tied across stages. No gradient is sent to the first stages if they are
    frozen.

    Args:
        split_points: layers that begin a stage, one fewer than there are ranks.
        accumulate: micro-batches, each of which passes through all stages, forward and backward,
            before the next one begins; as ``LocalGradients`` on one device.
        amp: see ``StagedModel``.

    Raises:
        ValueError: ``accumulate`` below 1.
    """

    accumulate: int = 1
    instead: ClassVar = ONE_AT_A_TIME

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("accumulate", self.accumulate)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        before, behind = self.index - 1, self.index + 1
        for part in range(self.start(inputs, targets, batch_size, self.accumulate)):
            if not self.is_first:
                self.hop(Hop(None, Message("activation", part, before)))
            self.forward(part)
            if not self.is_last:
                self.hop(Hop(Message("activation", part, behind), None))
            if self.index >= self.first_trained:
                if not self.is_last:
                    self.hop(Hop(None, Message("gradient", part, behind)))
                self.backward(part)
                if self.index > self.first_trained:
                    self.hop(Hop(Message("gradient", part, before), None))
        self.update()
        return self.loss_sum
