"""DDP, naive: when backward is over, gradients are all-reduced one by one."""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from labkit.collectives import broadcast, fast_ring_all_reduce
from labkit.comm.comm import Comm


class NaiveDDP(nn.Module):
    """A replica of ``module``: when backward is over, its gradients are all-reduced one by one.

    Used as the module itself: forward, ``backward()``, and the gradients are those of all ranks.
    Call ``zero_grad`` before each update: gradients that are left over would be summed again.

    Buffers (BatchNorm's statistics) are rank 0's: they are broadcast before the first forward
    after an update. A batch is normalised by its own share. Both are PyTorch's rules.
    A parameter without a gradient counts as zero, and has a gradient of zeros if it has none on
    any rank; an optimizer with momentum then goes on moving it, where one device would not.

    Args:
        comm: this rank's Comm. Other messages must wait until backward is over.
        module: on ``comm.device``; each rank may bring other values, rank 0's count.
        op: ``mean`` over the ranks, as PyTorch's, or ``sum``, for a loss that is divided already.
        find_unused: one all-reduce more, of a byte a parameter, tells what no rank has used: its
            gradient stays None, as on one device.

    What requires a gradient is settled here: a parameter that is unfrozen later is not summed.

    Raises:
        ValueError: nothing in the module requires a gradient.
    """

    def __init__(
        self, comm: Comm, module: nn.Module, *, op: str = "mean", find_unused: bool = False
    ):
        super().__init__()
        self.comm, self.module, self.op, self.find_unused = comm, module, op, find_unused
        # parameters() lists a tied parameter once.
        self.trained = [p for p in module.parameters() if p.requires_grad]
        if not self.trained:
            raise ValueError(
                "no parameter of this model requires a gradient: there is none to sum"
            )
        self._synchronise, self._in_backward, self._buffers_behind = True, False, False
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(comm, tensor)
        on_gradient = weakly(self._on_gradient)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(on_gradient)

    def forward(self, *inputs, **keywords):
        self._give_up_interrupted()
        self.broadcast_buffers()
        return self.module(*inputs, **keywords)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here only adds to this rank's own gradients; the next one sums them all."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def without_samples(self) -> None:
        """In place of forward and backward, on a rank that has no sample while others do."""
        self._give_up_interrupted()
        self.broadcast_buffers()
        if self._synchronise:
            self._end_backward()

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        """Let all ranks have rank 0's buffers, unless none can have changed."""
        if not self._buffers_behind:
            return
        self._buffers_behind = False
        for dtype in dict.fromkeys(buffer.dtype for buffer in self.module.buffers()):
            buffers = [b for b in self.module.buffers() if b.dtype == dtype]
            flat = broadcast(self.comm, torch.cat([b.flatten() for b in buffers]))
            if self.comm.rank:
                for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
                    buffer.copy_(values.view_as(buffer))

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._synchronise:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        self._take(parameter)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._in_backward, self._buffers_behind = False, True
        used = [parameter.grad is not None for parameter in self.trained]
        self._sum_gradients()
        if self.find_unused:
            anywhere = torch.tensor(used, dtype=torch.uint8, device=self.comm.device)
            self._all_reduce(anywhere, "max")
            for parameter, is_used in zip(self.trained, anywhere.tolist()):
                if not is_used:
                    parameter.grad = None

    def _give_up_interrupted(self) -> None:
        """A backward that raised never came to its end: let the next one begin anew."""
        # A forward may also be run again in the middle of a backward, by checkpointing.
        if self._in_backward and torch._C._current_graph_task_id() < 0:
            self._in_backward = False
            self._settle()

    def _take(self, parameter: nn.Parameter) -> None:
        """A gradient of this rank is complete; the naive way waits until all of them are."""

    def _settle(self) -> None:
        """Wait for what is under way; the naive way has nothing."""

    def _sum_gradients(self) -> None:
        """Backward is over on this rank: let every gradient be that of all ranks."""
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            fast_ring_all_reduce(self.comm, parameter.grad, self.op)

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        fast_ring_all_reduce(self.comm, tensor, op)


def weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its replica alive: the garbage collector sees no hooks."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        if found := reference():
            found(parameter)

    return hook
