"""PyTorch's own pipelines, ``torch.distributed.pipelining``, on the same stages as ours.

A ``PipelineStage`` wraps a rank's layers, a schedule sends micro-batches through it. Each stage
has receive buffers of one shape, so all micro-batches of a step must be equally large: a batch
that does not divide by ``micro_batches`` is cut into fewer.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from labkit.engine.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.staged_model import StagedModel
from labkit.units import check_choice

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(eq=False)
class TorchPipeline(StagedModel):
    """``ScheduleGPipe`` or ``Schedule1F1B``, the counterpart of ``Pipeline``.

    The evaluation uses our own hops. The bytes that PyTorch sends are not counted; in the trace
    ``communicate`` is everything in a step except forward, backward and update, waiting included.

    A batch that is cut into fewer than P micro-batches uses ``gpipe``, because PyTorch's 1F1B
    needs P or more.
    """

    micro_batches: int = 4
    schedule: str = "gpipe"
    recompute: bool = field(default=False, init=False)
    traits = replace(StagedModel.traits, through_comm=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("schedule of PyTorch's stages", self.schedule, _SCHEDULES)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().setup(comm, model, make_optimizer)
        # PyTorch's stages have fixed shapes: one schedule per count and shape of micro-batches.
        self._prepared: dict[tuple[Any, ...], Any] = {}

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        # Equally large micro-batches, as many as possible.
        count = min(self.micro_batches, len(targets))
        while count > 1 and len(targets) % count:
            count -= 1
        self.start_step(inputs, targets, batch_size, count)
        key = count, inputs.shape, inputs.dtype
        if key not in self._prepared:
            self._prepared[key] = self._schedule(count, inputs)
        entering = [inputs] if self.is_first else []
        target = targets if self.is_last else None
        with self.comm.span("communicate"):
            self._prepared[key].step(*entering, target=target, return_outputs=False)
        self.end_step()
        return self.loss_sum

    def _schedule(self, count: int, inputs: Tensor) -> Any:
        """Return PyTorch's schedule of ``count`` micro-batches, for a batch of this shape."""
        # PyTorch could find the shapes by a pass, which would change BatchNorm's averages.
        micro_batch = inputs[: len(inputs) // count]
        partition = self.partition
        entering = partition.boundary(micro_batch, self.stage_rank).detach()
        leaving = partition.boundary(micro_batch, self.stage_rank + 1).detach()
        stage = _TracedStage(
            _Layers(self),
            self.stage_rank,
            partition.num_stages,
            self.comm.device,
            input_args=entering.requires_grad_(self.stage_rank > partition.first_trained),
            output_args=leaving.requires_grad_(self.stage_rank >= partition.first_trained),
        )
        stage.comm = self.comm
        name = self.schedule if count >= partition.num_stages else "gpipe"
        # The loss is a sum over samples already: do not divide by the number of micro-batches.
        return _SCHEDULES[name](stage, count, self.scaled_loss, scale_grads=False)


@dataclass(eq=False)
class TorchModelParallel(TorchPipeline):
    """``TorchPipeline`` with one micro-batch, the counterpart of ``ModelParallel``."""

    micro_batches: int = field(default=1, init=False)
    schedule: str = field(default="gpipe", init=False)


class _Layers(nn.Module):
    """A stage's layers as PyTorch runs them; the output is contiguous, as gloo requires."""

    def __init__(self, strategy: StagedModel):
        super().__init__()
        self.layers = strategy.module
        self.stage = strategy.stages[0]

    def forward(self, entering: Tensor) -> Tensor:
        return self.stage.run(entering).contiguous()


class _TracedStage(PipelineStage):
    """A stage whose forwards and backwards appear in the trace, one span per micro-batch."""

    comm: Comm

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.comm.span("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.comm.span("backward"):
            return super().backward_one_chunk(*args, **kwargs)
