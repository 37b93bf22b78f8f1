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

from torch import Tensor

from labkit.schedules.pipeline import Hop, Message
from labkit.strategies.stage import StagedModel


class ModelParallel(StagedModel):
    """Rank s holds the layers from split point s to the next one.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    Parameters may be tied across stages. No gradient is sent to the first stages if they are
    frozen.

    Args:
        split_points: layers that begin a stage, one fewer than there are ranks.
    """

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        stage = self.stage
        before, behind = stage.index - 1, stage.index + 1
        stage.start(inputs, targets, batch_size)
        if not stage.is_first:
            stage.hop(Hop(None, Message("activation", 0, before)))
        stage.forward(0)
        if not stage.is_last:
            stage.hop(Hop(Message("activation", 0, behind), None))
        if stage.index >= stage.first_trained:
            if not stage.is_last:
                stage.hop(Hop(None, Message("gradient", 0, behind)))
            stage.backward(0)
            if stage.index > stage.first_trained:
                stage.hop(Hop(Message("gradient", 0, before), None))
        stage.update()
        return stage.loss
