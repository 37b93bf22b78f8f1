"""PyTorch's pipeline with one micro-batch: model parallelism."""

from collections.abc import Sequence

from labkit.strategies.builtin.pipeline import TorchPipeline


class TorchModelParallel(TorchPipeline):
    """``TorchPipeline`` with one micro-batch, the counterpart of ``ModelParallel``.

    Args:
        split_points: layers that begin a stage, one fewer than there are ranks.
    """

    def __init__(self, split_points: Sequence[int] = ()):
        super().__init__(split_points, micro_batches=1)
