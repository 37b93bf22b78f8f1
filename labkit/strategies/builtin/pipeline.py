"""PyTorch's own pipelines, ``torch.distributed.pipelining``, on the same stages as ours.

A ``PipelineStage`` wraps a rank's layers, a schedule sends micro-batches through it, and all
messages are ``isend`` and ``irecv`` of the ranks' process group. Each stage has receive buffers of
one shape, so all micro-batches of a step must be equally large. If a batch does not divide evenly,
the smaller micro-batches are padded with empty rows; layers and loss skip these rows, so that
nothing is computed that one device would not compute.

Symbols: P stages, M micro-batches.

Correct over gloo from PyTorch 2.8 on: before, the schedules kept only one handle of a batch of
messages (NCCL makes only one), so on gloo they did not wait for the other messages (issue 132644,
fixed by 152938).
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from labkit.comm.comm import Comm
from labkit.schedules.pipeline import pipeline_schedule
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.stage import PIPELINED_INSTEAD, StagedModel
from labkit.units import check_integer
from labkit.workload.layers import NonLeaf, output_shapes

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(eq=False)
class TorchPipeline(StagedModel):
    """``ScheduleGPipe`` or ``Schedule1F1B``, the counterpart of ``Pipeline``, with its contract.

    PyTorch leaves tied parameters to the user: their gradients are summed as in ``Pipeline``.
    The evaluation uses our own hops. The bytes that PyTorch sends are not counted; in the trace
    ``communicate`` is everything in a step except forward, backward and update, waiting included.

    A batch of fewer samples than micro-batches is cut into single samples, and one of fewer than P
    uses ``gpipe``, because PyTorch's 1F1B needs P micro-batches or more.
    """

    micro_batches: int = 4
    schedule: str = "gpipe"
    through_comm = False
    instead: ClassVar = PIPELINED_INSTEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        pipeline_schedule(self.schedule)  # raises ValueError for an unknown schedule
        check_integer("micro_batches", self.micro_batches)

    def check_ranks(self, world_size: int) -> None:
        super().check_ranks(world_size)
        if self.schedule == "1f1b" and self.micro_batches < world_size:
            raise ValueError(
                f"PyTorch's 1F1B needs at least as many micro-batches as stages, got "
                f"{self.micro_batches} for {world_size} stages: use {world_size} or more, "
                "schedule gpipe, or our own (without builtin)"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        if comm.world_size > 1 and comm.device.type == "cuda" and dist.get_backend() == "gloo":
            raise ValueError(
                "PyTorch's pipelines send from GPU to GPU, and gloo, which ranks that share a GPU "
                "have to use, sends host memory only: use device cpu, or our own (without builtin)"
            )
        super().setup(comm, model, make_optimizer)
        # By count and shape of the micro-batches: shapes are fixed in PyTorch's stages.
        self._prepared: dict[tuple[Any, ...], Any] = {}

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.zero_grad()
        self.loss_sum = targets.new_zeros((), dtype=torch.float64)
        self._divisor = batch_size
        count = min(self.micro_batches, len(targets))
        rows, options = math.ceil(len(targets) / count), {}
        key = count, rows, inputs.shape[1:], inputs.dtype
        if key not in self._prepared:
            self._prepared[key] = self._schedule(count, rows, inputs)
        if count * rows > len(targets):
            options["samples"] = torch.tensor([len(part) for part in targets.tensor_split(count)])
            inputs, targets = (
                pad_sequence(list(tensor.tensor_split(count)), batch_first=True).flatten(0, 1)
                for tensor in (inputs, targets)
            )
        entering = [inputs] if self.is_first else []
        options |= {"target": targets if self.is_last else None, "return_outputs": False}
        with self.comm.span("communicate"):
            self._prepared[key].step(*entering, **options)
        self.update()
        return self.loss_sum

    def _schedule(self, count: int, rows: int, inputs: Tensor) -> Any:
        """The schedule for ``count`` micro-batches of ``rows`` rows.

        The shapes are given: otherwise PyTorch (up to 2.11) finds them by a pass through the
        layers, which changes BatchNorm's averages.
        """
        sample = tuple(inputs.shape[1:])
        outputs = output_shapes(self.meta_model, sample, rows, inputs.dtype)
        crossing = [(shape, self.crossing(dtype)) for shape, dtype in outputs[:-1]]
        shapes = [((rows, *sample), inputs.dtype), *crossing, outputs[-1]]
        first, end = self.bounds[self.index]
        entering, leaving = (
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=has_gradient)
            for (shape, dtype), has_gradient in (
                (shapes[first], self.index > self.first_trained),
                (shapes[end], self.index >= self.first_trained),
            )
        )
        layers, place = _OnSamples(self), (self.index, self.num_stages, self.comm.device)
        stage = _TracedStage(layers, *place, input_args=entering, output_args=leaving)
        stage.comm = self.comm

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            # PyTorch calls this right after the forward of the same micro-batch.
            loss = self.loss(logits[: layers.count], targets[: layers.count])
            self.loss_sum += loss.detach()
            return self.scaler.scale(loss / self._divisor)

        name = self.schedule if count >= self.num_stages else "gpipe"
        # The loss is a sum over samples already: do not divide by the number of micro-batches.
        return _SCHEDULES[name](stage, count, loss, scale_grads=False)

    def notes(self) -> dict[str, Any]:
        """Where the model was cut."""
        return {"split_points": list(self.split_points)}


@dataclass(eq=False)
class TorchModelParallel(TorchPipeline):
    """``TorchPipeline`` with one micro-batch, the counterpart of ``ModelParallel``."""

    instead: ClassVar = StagedModel.instead | {
        "accumulate": "PyTorch's schedules have several micro-batches under way: that is strategy "
        "pipeline with micro_batches; without builtin, model_parallel runs them in turn"
    }

    micro_batches: int = field(default=1, init=False)
    schedule: str = field(default="gpipe", init=False)


class _OnSamples(nn.Module):
    """A stage's layers, applied only to the first ``samples`` of the rows [n, ...], if given.

    The output has as many rows as the input, and is contiguous, as gloo requires. ``count`` is the
    last ``samples``.
    """

    def __init__(self, strategy: TorchPipeline):
        super().__init__()
        self.layers, self.strategy = strategy.module, strategy
        self.count: int | None = None

    def forward(self, rows: Tensor, samples: Tensor | None = None) -> Tensor:
        # A new tensor: if the layers return their input itself, PyTorch (up to 2.11) detaches the
        # buffer into which it will receive the next input.
        entering = NonLeaf.apply(rows)
        self.count = len(rows) if samples is None else int(samples)
        strategy = self.strategy
        with strategy.precision.autocast(rows.device):
            leaving = self.layers(entering[: self.count])
        if strategy.is_last:
            leaving = strategy.precision.wide(leaving)
        else:
            leaving = leaving.to(strategy.crossing(leaving.dtype))
        empty = (0, 0) * (leaving.dim() - 1) + (0, len(rows) - len(leaving))
        return functional.pad(leaving, empty).contiguous()


class _TracedStage(PipelineStage):
    """A stage whose forwards and backwards appear in the trace, one span per micro-batch."""

    comm: Comm

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.comm.span("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.comm.span("backward"):
            return super().backward_one_chunk(*args, **kwargs)
