"""Replicas that sum their gradients: after backward (naive), or while it still runs (bucketed).

1. Every rank holds the whole model; rank 0's parameters and buffers are broadcast once. 2. Each
computes the gradients of its share of the batch. 3. Backward finds them from the last layer to the
first; a hook puts each into its bucket, and a full bucket is summed by a ring all-reduce in a
thread of its own, beside the rest of backward. 4. Every rank makes the same update.

``NaiveDDP`` does step 3 after backward, gradient by gradient; ``BucketedDDP`` does it as said.

Symbols: P ranks. Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training" (2020), section 3.2.
"""

import atexit
import functools

import torch
from torch import Tensor, nn

from labkit.collectives import fast_ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.work import Work
from labkit.comm.work_queue import WorkQueue
from labkit.schedules.buckets import MIB, assign_buckets
from labkit.strategies.ddp.naive import NaiveDDP

# How long the end of the process waits for a bucket that is under way.
_LAST_PATIENCE_S = 2.0


class BucketedDDP(NaiveDDP):
    """The same replica, faster: buckets leave while backward goes on.

    The gradients are views of their buckets, so a sum is never copied back.

    Args:
        bucket_mb: MiB of gradients a bucket; 0 is a bucket a parameter. See ``assign_buckets``.
        comm, module, op, find_unused: as for ``NaiveDDP``.
    """

    def __init__(self, comm: Comm, module: nn.Module, *, bucket_mb: float = 25, **options):
        super().__init__(comm, module, **options)
        sizes = [p.numel() * p.element_size() for p in self.trained]
        kinds = [p.dtype for p in self.trained]
        assigned = assign_buckets(sizes, bucket_mb * MIB, kinds=kinds)
        self.buckets = [Bucket([self.trained[i] for i in indices]) for indices in assigned]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._launched: list[Work] = []
        self._work_queue = _work_queue_of(comm)

    def _take(self, parameter: nn.Parameter) -> None:
        self._bucket_of[parameter].take(parameter)
        # Strictly in order: the ranks' gradients may come in different orders. The last bucket has
        # nothing left to run beside.
        while len(self._launched) < len(self.buckets) - 1:
            bucket = self.buckets[len(self._launched)]
            if bucket.missing:
                return
            self._launch(bucket, is_waited_for=self.comm.device.type == "cuda")

    def _sum_gradients(self) -> None:
        for bucket in self.buckets[len(self._launched) :]:
            for parameter in tuple(bucket.missing):
                bucket.take(parameter)
            self._launch(bucket, is_waited_for=True)
        self._settle()

    def _settle(self) -> None:
        launched, self._launched = self._launched, []
        with self.comm.span("wait"):
            for work in launched:
                work.wait()
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    def _launch(self, bucket: "Bucket", is_waited_for: bool) -> None:
        """Queue a bucket; what is waited for is carried out here, unless one is under way.

        On a GPU all are: the calls only queue work on the stream, which goes on by itself.
        """
        self._launched.append(self._queue(bucket.gradients(), self.op, is_waited_for))

    def _queue(self, tensor: Tensor, op: str, is_waited_for: bool) -> Work:
        return self._work_queue.add(
            "all_reduce",
            lambda comm: fast_ring_all_reduce(comm, tensor, op),
            [tensor],
            [tensor],
            is_waited_for,
        )

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        self._queue(tensor, op, is_waited_for=True).wait()


class Bucket:
    """Gradients that travel together: in one flat tensor, or one alone where it lies."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.missing = set(parameters)
        self.flat = None
        if len(parameters) > 1:
            self.flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
            pieces = self.flat.split([p.numel() for p in parameters])
            self._place = {p: piece.view_as(p) for p, piece in zip(parameters, pieces)}

    def take(self, parameter: nn.Parameter) -> None:
        """Let the parameter's gradient, zeros if there is none, lie in the bucket."""
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
        return self.parameters[0].grad if self.flat is None else self.flat


@functools.cache
def _work_queue_of(comm: Comm) -> WorkQueue:
    """One for all replicas on a comm: two of them in one backward must not mix their messages."""
    # The run has a deadline of its own.
    work_queue = WorkQueue("labkit-ddp", comm, timeout_s=float("inf"))
    atexit.register(work_queue.end, _LAST_PATIENCE_S)
    return work_queue
