"""Distributed data parallelism (DDP): gradients are summed while backward computes the others.

1. Every rank holds the whole model; rank 0's parameters and buffers are broadcast once. 2. Each
rank computes the gradients of its share of the batch. 3. Each gradient becomes the mean (or sum)
over the ranks. 4. Every rank makes the same update.

**Naive** (``NaiveDDP``): step 3 begins when backward has ended, and all-reduces the gradients one
by one. **Fast** (``BucketedDDP``): backward computes the gradients from the last layer to the
first; a hook puts each gradient into its bucket; another thread all-reduces each full bucket,
while the rest of backward runs.

**Local SGD** (``average_every`` K) leaves step 3 out, and averages parameters every K updates:
``labkit.strategies.local_sgd``.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), sections 3.2.1 (naive), 3.2.2 (buckets) and 3.2.3 (overlap).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from labkit.collectives import (
    SharedBucket,
    broadcast,
    broadcast_coalesced,
    fast_hierarchical_all_reduce,
    fast_ring_all_reduce,
)
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.work import Work, work_queue_of
from labkit.schedules.bucket_assignment import MIB, assign_buckets
from labkit.strategies.base import MakeOptimizer, make_dense, trained_parameters
from labkit.strategies.flat_tensors import views_of
from labkit.strategies.local_sgd import LocalSGD, OuterStep
from labkit.strategies.on_shares import OnShares


class NaiveDDP(nn.Module):
    """A replica of ``module`` whose gradients are all-reduced when backward returns.

    It is used like the module itself. Call ``zero_grad`` after each update: otherwise the old
    gradients, which are summed already, are summed again.

    Buffers (BatchNorm's statistics) are rank 0's: they are broadcast after each all-reduce. Each
    rank normalizes with the statistics of its own share. A missing gradient becomes zeros. A
    parameter that is unfrozen later is not summed.

    Args:
        comm: this rank's Comm. Send nothing else on it until backward has returned.
        module: on ``comm.device``; values may differ between ranks, rank 0's are taken.
        op: ``mean`` over the ranks, as in PyTorch, or ``sum``, for a loss that is divided already.
        hierarchical: sum inside each host first, then between hosts.
    """

    def __init__(
        self, comm: Comm, module: nn.Module, *, op: str = "mean", hierarchical: bool = False
    ):
        super().__init__()
        self.comm = comm
        self.module = module
        self.op = op
        self.hierarchical = hierarchical
        self.all_reduce = fast_hierarchical_all_reduce if hierarchical else fast_ring_all_reduce
        self.trained = trained_parameters(module)
        self._synchronizes = True
        self._in_backward = False
        self._will_end = False  # whether autograd will call ``_on_end``
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(comm, tensor)
        # (Python's collector does not see a cycle that goes through such a hook.)
        replica_ref: weakref.ref[NaiveDDP] = weakref.ref(self)
        self._output_hook = partial(self._on_output, replica_ref)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, replica_ref))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        # (Activation checkpointing may call it inside a backward.)
        if torch._C._current_graph_task_id() == -1:
            self._forget_broken_backward()
        outputs = self.module(*inputs, **keywords)
        # Here the outermost backward begins: inside it checkpointed layers may run their own.
        for output in tree_leaves(outputs):
            # (A leaf, such as a parameter that is returned, would keep the hooks of all steps.)
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(self._output_hook)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward only adds to this rank's gradients, without all-reduce.

        The first backward after the context all-reduces the accumulated gradients.
        """
        before = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before

    # The hooks, in the order in which a backward calls them.

    @staticmethod
    def _on_output(replica_ref: "weakref.ref[NaiveDDP]", output_gradient: Tensor) -> None:
        replica = replica_ref()
        if replica is not None and replica._synchronizes:
            replica._await_end()

    @staticmethod
    @torch.no_grad()
    def _on_gradient(replica_ref: "weakref.ref[NaiveDDP]", parameter: nn.Parameter) -> None:
        replica = replica_ref()
        if replica is None:
            return
        # A sum over ranks is not sparse for long.
        make_dense(parameter)
        if replica._synchronizes:
            replica._await_end()
            replica._in_backward = True
            replica.gradient_ready(parameter)

    def _await_end(self) -> None:
        """Have ``_on_end`` called when the backward under way ends."""
        if not self._will_end:
            self._will_end = True
            Variable._execution_engine.queue_callback(self._on_end)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called when backward has computed a gradient; this class waits until backward ends."""

    def _on_end(self) -> None:
        self._will_end = False
        if self._in_backward:  # a gradient has come: ``torch.autograd.grad`` gives none
            self._in_backward = False
            self.end_backward()

    @torch.no_grad()
    def end_backward(self) -> None:
        """Called when backward has ended; call it on a rank without samples, in its place."""
        self._forget_broken_backward()
        self.sum_gradients()
        broadcast_coalesced(self.comm, self.module.buffers())

    def sum_gradients(self) -> None:
        """All-reduce every gradient; called when backward has ended on this rank."""
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.all_reduce(self.comm, parameter.grad, self.op)

    def _forget_broken_backward(self) -> None:
        """Begin anew if an exception has ended the last backward: PyTorch calls no ``_on_end``."""
        self._will_end = False
        if self._in_backward:
            self._in_backward = False
            self.drop_sums()

    def drop_sums(self) -> None:
        """Called before the next backward if one was broken off; this class has sent nothing."""


class BucketedDDP(NaiveDDP):
    """A ``NaiveDDP`` that sums gradients in buckets, while the rest of backward runs.

    The gradients are views of their buckets, so that sums need not be copied back; between ranks
    that share memory, buckets need not be copied either (``SharedBucket``). ``bucket_mb`` are MiB
    of gradients per bucket; 0 gives every parameter a bucket.
    """

    def __init__(self, comm: Comm, module: nn.Module, *, bucket_mb: float = 25, **options: Any):
        super().__init__(comm, module, **options)
        self.buckets = make_buckets(comm, self.trained, bucket_mb, self.op, self.hierarchical)
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
        self._launched: list[Work] = []

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Put a gradient into its bucket, and send the buckets whose turn has come.

        A bucket is sent when it is full and all buckets before it have been sent: backward may
        compute gradients in different orders on different ranks, but all ranks must all-reduce
        the buckets in the same order. The last bucket is sent when backward has ended, because no
        computation is left that could overlap with it.
        """
        if parameter not in self._bucket_of[parameter].missing:
            raise ValueError(
                f"a parameter {list(parameter.shape)} got another gradient after its sum began: "
                "with activation checkpointing, call checkpoint with use_reentrant=False"
            )
        self._bucket_of[parameter].take(parameter)
        while len(self._launched) < len(self.buckets) - 1:
            bucket = self.buckets[len(self._launched)]
            if bucket.missing:
                return
            # Its thread reduces the bucket, while backward goes on in this one.
            queue = work_queue_of(self.comm)
            work = queue.add("all_reduce", bucket.all_reduce, [bucket.flat], [bucket.flat])
            self._launched.append(work)

    def sum_gradients(self) -> None:
        """Send the remaining buckets, also those with missing gradients, and wait for all."""
        queue = work_queue_of(self.comm)
        for bucket in self.buckets[len(self._launched) :]:
            for parameter in tuple(bucket.missing):
                bucket.take(parameter)
            # What is waited for may run in this thread.
            tensors = [bucket.flat]
            work = queue.add("all_reduce", bucket.all_reduce, tensors, tensors, is_waited_for=True)
            self._launched.append(work)
        self._wait()

    def drop_sums(self) -> None:
        """After a broken backward, wait for what was launched, and zero its buckets.

        The sums may have arrived after the zeros of the caller's ``zero_grad``.
        """
        sent = self.buckets[: len(self._launched)]
        self._wait()
        for bucket in sent:
            bucket.flat.zero_()

    def _wait(self) -> None:
        """Wait for all that was sent; then all gradients are missing again."""
        with self.comm.span("wait"):
            for work in self._launched:
                work.wait()
        self._launched.clear()
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)


class Bucket:
    """Gradients that are all-reduced together, as views of one flat tensor [N].

    ``missing`` are the parameters without a gradient so far in this backward; a full one has none.
    ``all_reduce(comm)`` is what reduces ``flat``, in place. To send it in fewer bytes, take a
    function of ``labkit.collectives.compressed``. Those only add, so with ``op`` "mean" divide
    ``flat`` by the number of ranks before.
    """

    def __init__(self, comm: Comm, parameters: list[nn.Parameter], op: str, hierarchical: bool):
        self.parameters = parameters
        self.missing = set(parameters)
        num_elements = sum(parameter.numel() for parameter in parameters)
        first = parameters[0]
        shared = SharedBucket(comm, num_elements, first.dtype, first.device)
        self.flat = shared.flat
        self.all_reduce: Callable[[Comm], object] = partial(shared.all_reduce, op=op)
        if hierarchical:
            self.all_reduce = partial(fast_hierarchical_all_reduce, tensor=self.flat, op=op)
        self._views = dict(zip(parameters, views_of(self.flat[:num_elements], parameters)))

    def take(self, parameter: nn.Parameter) -> None:
        """Put the parameter's gradient, zeros if it has none, into the bucket."""
        self.missing.discard(parameter)
        view = self._views[parameter]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        parameter.grad = view


def make_buckets(
    comm: Comm,
    parameters: list[nn.Parameter],
    bucket_mb: float,
    op: str = "sum",
    hierarchical: bool = False,
) -> list[Bucket]:
    """The buckets of ``bucket_mb`` MiB, each of one dtype, in the order in which they are sent."""
    sizes_bytes = [parameter.nbytes for parameter in parameters]
    dtypes = [parameter.dtype for parameter in parameters]
    buckets = []
    for indices in assign_buckets(sizes_bytes, bucket_mb * MIB, kinds=dtypes):
        buckets.append(Bucket(comm, [parameters[i] for i in indices], op, hierarchical))
    return buckets


@dataclass(eq=False)
class DDP(OnShares):
    """Data parallelism with ``BucketedDDP``; one synchronization per update, or per several.

    Args:
        average_every: K, for local SGD: parameters are averaged after every K updates of an epoch
            and at its end. ``clip_norm`` limits the norm of each rank's own gradient. If the
            weights of a loss depend on the data, ranks add up the weight in every step.
        outer_lr, outer_momentum: DiLoCo's outer step at every average; its paper takes 0.7 and
            0.9. With 1 and 0 there is none.
    """

    sync_batch_norm: bool = False
    bucket_mb: float = 25
    hierarchical: bool = False
    average_every: int | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.outer_step: OuterStep | None = None
        if (self.outer_lr, self.outer_momentum) != (1.0, 0.0):
            self.outer_step = OuterStep(self.outer_lr, self.outer_momentum)
        if self.average_every is None:
            if self.outer_step is not None:
                raise ValueError(
                    f"outer_lr {self.outer_lr} and outer_momentum {self.outer_momentum} are of an "
                    "average of parameters: give average_every, the updates between two of them"
                )
            return
        no_checkpoint = (
            f"with average_every {self.average_every} momenta differ between ranks, and a "
            "checkpoint holds one optimizer"
        )
        self.traits = replace(self.traits, no_checkpoint=no_checkpoint)
        refused = {
            "sync_batch_norm": (self.sync_batch_norm, "communicates in every step"),
            "bucket_mb": (self.bucket_mb != 25, "is about gradients, which stay local"),
            "amp fp16": (self.amp == "fp16", "skips updates, on some ranks: take bf16"),
        }
        for name, (is_given, reason) in refused.items():
            if is_given:
                raise ValueError(
                    f"average_every {self.average_every} does not go with {name}, which {reason}"
                )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().setup(comm, model, make_optimizer)
        if self.average_every is not None:
            self.replica: BucketedDDP | None = None
            self.local_sgd = LocalSGD(comm, self.model, self.hierarchical, self.outer_step)
            self.since_average = 0
            # Then the mean of the ranks' gradients is that of the mean loss over the global batch.
            self.loss_factor = comm.world_size
            return
        self.replica = BucketedDDP(
            comm, self.model, op="sum", hierarchical=self.hierarchical, bucket_mb=self.bucket_mb
        )
        self.module = self.replica
        self.no_sync = self.replica.no_sync

    def finish_backward(self) -> None:
        if self.replica is not None and self.ended_empty and not self.runs_empty:
            self.replica.end_backward()

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        loss = super().step(inputs, targets, batch_size)
        if self.average_every is not None:
            self.since_average += 1
            if self.since_average == self.average_every:
                self._average()
        return loss

    def end_epoch(self) -> None:
        if self.average_every is not None and self.since_average:
            self._average()

    def _average(self) -> None:
        self.local_sgd.average()
        self.since_average = 0
