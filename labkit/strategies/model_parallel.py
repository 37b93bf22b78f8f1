"""Model and pipeline parallelism: the model is cut into stages, each on its own device.

The batch passes through the stages one after another, forward and then backward (drawn in
``schedules.one_by_one``).

A device needs memory only for its own stage: that is the purpose of the technique. While one stage
works, all others wait, so the technique is no faster than one device.

**Naive** (``ModelParallelOneProcess``): one process, whose activations are copied between the
devices of one machine; with one GPU, ``("cuda:0", "cpu")`` cuts the model between GPU and host.
**Over ranks** (``ModelParallel``): a process for each stage, on any machine.
**In a pipeline** (``Pipeline``): M micro-batches, so that all P stages can work at the same time.
A stage idles for (P - 1) / (M + P - 1) of the step if all take equally long.

Sources: the manual placement that PyTorch's tutorials call model parallelism; Huang et al.,
"GPipe: Efficient training of giant neural networks using pipeline parallelism" (2019); Narayanan
et al., "PipeDream" (2019), for the order called 1F1B; the papers of ``schedules.pipeline``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.comm.comm import Comm
from labkit.schedules.pipeline import PIPELINES, stages_on_each
from labkit.schedules.split_points import stage_bounds
from labkit.schedules.timetable import instructions
from labkit.strategies.base import MakeOptimizer, trained_parameters
from labkit.strategies.on_shares import OnShares
from labkit.strategies.staged_model import StagedModel
from labkit.strategies.traits import Traits
from labkit.workload.layers import layers_of


@dataclass(eq=False)
class ModelParallelOneProcess(OnShares):
    """Stage s of the model on device s, all in one process.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    In the trace, ``hop`` and ``hop back`` are the copies between devices. A tied parameter can be
    on only one device.

    A copy is queued on a stream and returns at once, so a clock around the call does not measure
    it. PyTorch copies on the current stream of the source device, or, from the host, of the
    target: the events of a span are recorded there. Between two GPUs, the copy first waits until
    the target's stream is free: this wait is queued before the first event.
    """

    split_points: Sequence[int] = ()
    devices: Sequence[Any] = ("cpu",)
    traits = Traits(in_one_process=True, through_comm=False)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm = comm
        self.model = model.train()
        layers = layers_of(model)
        bounds = stage_bounds(self.split_points, len(layers))
        self.stages = []
        for (start, end), device in zip(bounds, self.devices, strict=True):
            self.stages.append(nn.Sequential(*layers[start:end]).to(device))
        self.module = self.run
        self.trained = trained_parameters(model)
        self.optimizer = make_optimizer(self.trained)
        comm.session.time_on(self.devices)

    def run(self, inputs: Tensor) -> Tensor:
        value = self.stages[0](inputs.to(self.devices[0]))
        # (A caller's autocast is that of the first device's type; a GPU and the CPU differ.)
        is_autocast = torch.is_autocast_enabled(self.devices[0].type)
        for stage, source, target in zip(self.stages[1:], self.devices, self.devices[1:]):
            with torch.autocast(target.type, self.precision.half, enabled=is_autocast):
                value = stage(_Crossing.apply(value, self, source, target))
        return value

    def move(self, kind: str, value: Tensor, source: torch.device, target: torch.device) -> Tensor:
        """Copy an activation or a gradient to ``target``, in a span of this ``kind``."""
        gpus = [device for device in (source, target) if device.type == "cuda"]
        between_gpus = len(gpus) == 2
        if between_gpus:
            torch.cuda.current_stream(source).wait_stream(torch.cuda.current_stream(target))
        with self.comm.span(kind, gpus[0] if gpus else source):
            return value.to(target, non_blocking=between_gpus, copy=True)

    def notes(self) -> dict[str, Any]:
        names = [str(device) for device in self.devices]
        return {"split_points": list(self.split_points), "devices": names}


class _Crossing(torch.autograd.Function):
    """Forward moves the activation over a cut, backward moves its gradient back."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, strategy: ModelParallelOneProcess, *ends: torch.device
    ) -> Tensor:
        ctx.strategy = strategy
        ctx.source, ctx.target = ends
        return strategy.move("hop", value, *ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        moved = ctx.strategy.move("hop back", gradients[0], ctx.target, ctx.source)
        return moved, None, None, None


@dataclass(eq=False)
class ModelParallel(StagedModel):
    """Rank s holds the layers from split point s to the next one.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    With ``accumulate`` each micro-batch passes through all stages, forward and backward, before
    the next one begins (``schedules.one_by_one``); as ``OnShares`` on one device.
    """

    accumulate: int = 1

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        return self.run_step(inputs, targets, batch_size, self.accumulate)


@dataclass(eq=False)
class Pipeline(StagedModel):
    """``ModelParallel`` with micro-batches under way on all stages at once.

    The update waits for all micro-batches, so the result equals that of one device that
    accumulates the same micro-batches. Each is normalized (BatchNorm) with its own statistics.

    Args:
        micro_batches: M; a batch of fewer samples is cut into single samples.
        schedule: ``gpipe``, all forwards first; ``1f1b``, which holds fewer activations;
            ``zero_bubble``, which cuts a backward in two; ``interleaved``, with several stages on
            each rank. Messages of the last two move beside the rank's work. One of your own is a
            row of ``schedules.pipeline.PIPELINES``.
        stages_per_rank: V, of ``interleaved``; 2 by default.
    """

    micro_batches: int = 4
    schedule: str = "gpipe"
    stages_per_rank: int | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stages_per_rank = stages_on_each(self.schedule, self.stages_per_rank)
        self.pipelining = PIPELINES[self.schedule]

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError for a schedule of one's own that is no training step on these ranks."""
        options = {"stages_per_rank": self.stages_per_rank}
        instructions(self.pipelining, 0, world_size, self.micro_batches, **options)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        return self.run_step(inputs, targets, batch_size, self.micro_batches)
