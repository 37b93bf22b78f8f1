"""Pipeline parallelism: a batch passes through the stages in micro-batches.

So all stages can work at the same time, on different micro-batches. Each stage executes a stream
of instructions: ``gpipe`` or ``one_f_one_b`` of ``labkit.schedules.pipeline`` says which stage
runs which micro-batch when, and ``with_hops`` adds the messages between the stages. The update
waits for all micro-batches, so the technique is synchronous: its result equals that of one device
that accumulates the gradients of the same micro-batches.

Symbols: P stages, M micro-batches. A stage idles for (P - 1) / (M + P - 1) of the step if all
stages take equally long (``costs.bubble_formula``).

Source: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline
parallelism" (2019); Narayanan et al., "PipeDream" (2019), for the order called 1F1B.
"""

from dataclasses import dataclass

from torch import Tensor

from labkit.schedules.pipeline import pipeline_schedule, with_hops
from labkit.strategies.stage import StagedModel


@dataclass(eq=False)
class Pipeline(StagedModel):
    """``ModelParallel`` with micro-batches under way on all stages at once.

    Batch statistics (BatchNorm): each micro-batch is normalised with its own statistics, and each
    updates the running averages, as with gradient accumulation on one device.

    Args:
        split_points: layers that begin a stage, one fewer than there are ranks.
        micro_batches: M; a batch of fewer samples is cut into single samples.
        schedule: ``gpipe``, all forwards first, or ``1f1b``, which holds fewer activations.
        amp: see ``StagedModel``.
    """

    micro_batches: int = 4
    schedule: str = "gpipe"

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        count = self.start(inputs, targets, batch_size, self.micro_batches)
        actions = pipeline_schedule(self.schedule)(self.index, self.num_stages, count)
        for step in with_hops(actions, self.index, self.num_stages, self.first_trained):
            self.do(step)
        self.update()
        return self.loss_sum
