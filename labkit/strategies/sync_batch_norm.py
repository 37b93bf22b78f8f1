"""SyncBatchNorm: BatchNorm with the mean and variance of the global batch, not of a rank's share.

Where ranks divide a batch between them, a layer sees only a share of it. Forward, by channel:

1. Each worker counts its values, n_r, and computes their mean m_r and M_r, the sum of the squared
   deviations from it. 2. All workers get these three numbers of all others (an all-gather), as one
   row of 2 C + 1. 3. They combine them: n = sum n_r, m = sum n_r m_r / n, variance
   v = sum (M_r + n_r (m_r - m)^2) / n. A sum of squares minus the square of the sum would cancel
   where the mean is large. 4. y = (x - m) / sqrt(v + eps), and weight and bias.

Backward: m and v depend on every x of the batch, so the gradient of each x depends on all workers'
shares. 5. Autograd computes dL/dm and dL/dv from this worker's y. 6. All workers get these 2 C
numbers of all others and add them. 7. dL/dx = (dL/dm + 2 (x - m) dL/dv) / n, beside what comes
through step 4.

The rows travel as float64, and all workers combine them in the same order: their statistics and
running averages are equal to the bit.

Symbols: W workers, r one of them, C channels, n values per channel in the whole batch.
Sources: Ioffe and Szegedy, "Batch normalization" (2015), section 3; Chan, Golub and LeVeque,
"Algorithms for computing the sample variance" (1983), for step 3; Peng et al., "MegDet" (2018),
section 3.3, for the exchange; PyTorch's ``nn.SyncBatchNorm``, which runs on GPUs only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.collectives import all_gather
from labkit.engine.comm.comm import Comm, SubComm
from labkit.engine.comm.work import work_queue_of


class GlobalBatch:
    """The workers that divide a batch, and the exchange of their statistics."""

    def __init__(self, comm: Comm, workers: Sequence[int]):
        self.comm = comm
        self.workers = workers

    def gathered(self, row: Tensor) -> Tensor:
        """All workers' rows [W, K], in their order, from this one's [K]; equal to the bit on all.

        Takes W - 1 steps and messages, and sends (W - 1) K elements.
        """
        rows = row.new_empty(len(self.workers), len(row))

        def gather_rows(comm: Comm) -> None:
            # A rank that serves takes no part.
            if len(self.workers) < comm.world_size:
                comm = SubComm(comm, self.workers)
            torch.stack(all_gather(comm, row), out=rows)

        # Not on comm itself: buckets of DDP may be under way, and messages must not mix.
        queue = work_queue_of(self.comm)
        work = queue.add("sync_batch_norm", gather_rows, [row], [rows], is_waited_for=True)
        with self.comm.span("wait"):
            work.wait()
        return rows


class Statistics(torch.autograd.Function):
    """Inputs [n, C, ...] -> mean [C] and variance [C] of the global batch, and their count n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: GlobalBatch) -> tuple[Tensor, Tensor, int]:
        channels = x.shape[1]
        row = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if x.numel():
            axes = [axis for axis in range(x.dim()) if axis != 1]
            variance, mean = torch.var_mean(x, axes, correction=0)
            row[:channels] = mean
            row[-1] = x.numel() // channels
            row[channels:-1] = variance.double() * row[-1]
        means, squares, counts = batch.gathered(row).split([channels, channels, 1], dim=1)
        count = int(counts.sum())
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean) ** 2).sum(0) / count
        ctx.save_for_backward(x, mean)
        ctx.batch = batch
        ctx.count = count
        return mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        summed = ctx.batch.gathered(torch.cat(gradients[:2])).sum(0)
        mean_gradient, variance_gradient = summed.chunk(2)
        deviation = x - by_channel(mean, x)
        numerator = by_channel(mean_gradient, x) + 2 * deviation * by_channel(variance_gradient, x)
        return numerator / ctx.count, None


def by_channel(numbers: Tensor, x: Tensor) -> Tensor:
    """Numbers [C] as [1, C, 1, ...], in the dtype of x [n, C, ...]."""
    return numbers.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))


class SyncBatchNorm(_BatchNorm):
    """The class that ``convert`` gives to BatchNorm1d, 2d and 3d; the object stays the same.

    Parameters, buffers, names and hooks stay. In evaluation mode it is the layer that it was.
    16-bit inputs are computed in float32.
    """

    global_batch: GlobalBatch

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        with torch.autocast(input.device.type, enabled=False):
            x = input.float() if input.dtype.itemsize < 4 else input
            mean, variance, count = Statistics.apply(x, self.global_batch)
            if self.track_running_stats:
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                factor = self.momentum
                if factor is None:
                    factor = 1 / float(self.num_batches_tracked)
                unbiased = variance.detach() * (count / max(1, count - 1))
                averages = ((self.running_mean, mean), (self.running_var, unbiased))
                for average, value in averages:
                    assert average is not None
                    average.lerp_(value.detach().to(average.dtype), factor)
            scale = (variance + self.eps).rsqrt()
            if self.weight is not None:
                scale = scale * self.weight
            y = (x - by_channel(mean, x)) * by_channel(scale, x)
            if self.bias is not None:
                y = y + by_channel(self.bias, x)
            return y.to(input.dtype)


def convert(model: nn.Module, comm: Comm, workers: Sequence[int]) -> None:
    """Let every BatchNorm in ``model`` use the statistics of the global batch from now on.

    In place, at any depth. All workers have to run the same layers in the same order, also those
    without samples. ValueError for a layer with its own forward.
    """
    batch = GlobalBatch(comm, workers)
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise ValueError(
                f"{name} is a {type(layer).__name__} that has its own forward: use "
                "BatchNorm1d, 2d or 3d, or leave sync_batch_norm out"
            )
        layer.__class__ = type("SyncBatchNorm", (SyncBatchNorm, type(layer)), {})
        layer.__dict__["global_batch"] = batch
