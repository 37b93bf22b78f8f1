"""PyTorch's pipeline with one micro-batch: model parallelism."""

from collections.abc import Sequence
from typing import ClassVar

from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.stage import StagedModel


class TorchModelParallel(TorchPipeline):
    """``TorchPipeline`` with one micro-batch, the counterpart of ``ModelParallel``.

    Args:
        split_points: layers that begin a stage, one fewer than there are ranks.
        amp: see ``TorchPipeline``.
    """

    instead: ClassVar = StagedModel.instead | {
        "accumulate": "PyTorch's schedules have several micro-batches under way: that is strategy "
        "pipeline with micro_batches; without builtin, model_parallel runs them in turn"
    }

    def __init__(self, split_points: Sequence[int] = (), amp: str | None = None):
        super().__init__(split_points, micro_batches=1, amp=amp)
