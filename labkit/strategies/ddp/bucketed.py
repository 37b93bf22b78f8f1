"""DDP, fast: gradients are all-reduced in buckets, while backward is still running.

The same as ``naive``, except for step 3. Backward computes the gradients from the last layer to
the first; a hook puts each gradient into its bucket; another thread sums a full bucket by ring
all-reduce, while the rest of backward runs (``gradient_ready`` says when).

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), sections 3.2.2 and 3.2.3.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import fast_ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.tensors import check_tensor
from labkit.comm.work import Work, work_queue_of
from labkit.schedules.bucket_assignment import MIB, assign_buckets
from labkit.strategies.ddp.naive import NaiveDDP


class BucketedDDP(NaiveDDP):
    """A ``NaiveDDP`` that sums gradients in buckets, while the rest of backward runs.

    The gradients are views of their buckets, so that sums need not be copied back.

    Args:
        bucket_mb: MiB of gradients per bucket; 0 gives every parameter a bucket. See
            ``schedules.bucket_assignment.assign_buckets``.
        comm, module, op, hierarchical: as for ``NaiveDDP``.
    """

    def __init__(self, comm: Comm, module: nn.Module, *, bucket_mb: float = 25, **options: Any):
        super().__init__(comm, module, **options)
        sizes = [p.numel() * p.element_size() for p in self.trained]
        kinds = [p.dtype for p in self.trained]
        assigned = assign_buckets(sizes, bucket_mb * MIB, kinds=kinds)
        self.buckets = [Bucket([self.trained[i] for i in indices]) for indices in assigned]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._launched: list[Work] = []

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Put a gradient into its bucket, and send the buckets whose turn has come.

        A bucket is sent when it is full and all buckets before it have been sent: backward may
        compute gradients in different orders on different ranks, but all ranks must all-reduce
        the buckets in the same order. The last bucket is sent when backward has ended, because no
        computation is left that could overlap with it.
        """
        self._bucket_of[parameter].take(parameter)
        while len(self._launched) < len(self.buckets) - 1:
            bucket = self.buckets[len(self._launched)]
            if bucket.missing:
                return
            self._launch(bucket)

    def sum_gradients(self) -> None:
        for bucket in self.buckets[len(self._launched) :]:
            for parameter in tuple(bucket.missing):
                bucket.take(parameter)
            self._launch(bucket, is_waited_for=True)
        self._wait_for_launched()

    def _wait_for_launched(self) -> None:
        launched, self._launched = self._launched, []
        with self.comm.span("wait"):
            for work in launched:
                work.wait()
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    def _launch(self, bucket: "Bucket", is_waited_for: bool = False) -> None:
        """Queue a bucket; one that is waited for runs in this thread if no other is under way."""
        gradients, all_reduce = bucket.gradients(), self.sum_over_ranks
        work = start_all_reduce(self.comm, gradients, self.op, is_waited_for, all_reduce)
        self._launched.append(work)


class Bucket:
    """Gradients that are all-reduced together, in one flat tensor; a single one is not copied."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        # Those without a gradient so far in this backward; if there are none, the bucket is full.
        self.missing = set(parameters)
        # [N], of which the gradients are views; None for a single gradient.
        self.flat: Tensor | None = None
        if len(parameters) > 1:
            self.flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
            pieces = self.flat.split([p.numel() for p in parameters])
            self._place = {p: piece.view_as(p) for p, piece in zip(parameters, pieces)}

    def take(self, parameter: nn.Parameter) -> None:
        """Put the parameter's gradient, zeros if it has none, into the bucket."""
        self.missing.discard(parameter)
        gradient = parameter.grad
        if self.flat is None:
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
            return
        place = self._place[parameter]
        if gradient is None:
            place.zero_()
        elif gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
        parameter.grad = place

    def gradients(self) -> Tensor:
        """The tensor that is all-reduced: ``flat``, or the single gradient."""
        if self.flat is not None:
            return self.flat
        (parameter,) = self.parameters
        assert parameter.grad is not None, "a bucket is sent when it is full"
        return parameter.grad


def start_all_reduce(
    comm: Comm,
    tensor: Tensor,
    op: str = "sum",
    is_waited_for: bool = False,
    all_reduce: Callable[[Comm, Tensor, str], Tensor] = fast_ring_all_reduce,
) -> Work:
    """Begin an all-reduce in another thread, and return its handle at once.

    The all-reduces of a rank run one after another in the order of the calls, which must be equal
    on all ranks. Neither read nor change the tensor until ``wait()`` of the handle has returned.
    On a GPU they run on a stream of their own: see ``WorkQueue``.

    ``is_waited_for``: the caller will wait at once, so it may be carried out in this thread.
    """
    check_tensor(tensor, comm.device)  # here, since an error of the other thread comes with wait()
    return work_queue_of(comm).add(
        "all_reduce",
        lambda comm: all_reduce(comm, tensor, op),
        [tensor],
        [tensor],
        is_waited_for,
    )
