"""A model's parameters as one flat tensor, and its buffers: flat as well, or averaged.

A flat tensor [N] can be cut anywhere, into chunks of equal size, and one message can carry all of
it. A list of tensors cannot be cut evenly, and each of many small messages has a latency.
"""

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast, ring_all_reduce
from labkit.comm.comm import Comm
from labkit.strategies.sync_batch_norm import batch_norms


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require a gradient; a tied one comes once.

    Raises:
        ValueError: there are none.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter of this model requires a gradient: there is nothing to train"
        )
    return trained


def lay_end_to_end(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Move a model's trained parameters into one flat tensor, and make them views of it.

    Returns:
        (values [N], gradients [N]); the gradients are zeros. The parameters' ``grad`` are views of
        ``gradients``, to which backward adds. Reset it with ``gradients.zero_()``: an optimizer's
        ``zero_grad`` would remove the views.

    Raises:
        ValueError: nothing in the model requires a gradient.
    """
    trained = trained_parameters(model)
    values = torch.cat([p.detach().flatten() for p in trained])
    gradients = torch.zeros_like(values)
    sizes = [p.numel() for p in trained]
    for parameter, value, gradient in zip(trained, values.split(sizes), gradients.split(sizes)):
        parameter.data = value.view_as(parameter)
        parameter.grad = gradient.view_as(parameter)
    return values, gradients


@torch.no_grad()
def average_buffers(
    comm: Comm, model: nn.Module, workers: range, sync_batch_norm: bool = False
) -> None:
    """Give all ranks the mean of the workers' buffers (BatchNorm's running averages).

    Counters are those of the first worker, which has a share of every batch; the shares of other
    workers may have been empty. With ``sync_batch_norm`` BatchNorm's buffers are equal on all
    workers, and only sent to ranks that are none.
    """
    norms = [layer for _, layer in batch_norms(model)] if sync_batch_norm else []
    equal = {id(buffer) for layer in norms for buffer in layer.buffers()}
    for buffer in model.buffers():
        if id(buffer) in equal:
            # The mean of three equal numbers may be another number.
            if len(workers) < comm.world_size:
                broadcast(comm, buffer, root=workers[0])
            continue
        averaged = buffer.is_floating_point()
        if comm.rank not in (workers if averaged else workers[:1]):
            buffer.zero_()
        ring_all_reduce(comm, buffer)
        if averaged:
            buffer /= len(workers)


def flat_buffers(model: nn.Module) -> Tensor:
    """A model's buffers end to end, [B], in its parameters' dtype (a counter up to 2^24 is exact).

    The tensor is empty if the model has none.
    """
    like = next(model.parameters())
    return torch.cat([like.new_empty(0), *(b.flatten().to(like) for b in model.buffers())])


@torch.no_grad()
def load_flat_buffers(model: nn.Module, flat: Tensor) -> None:
    """Set a model's buffers to those that ``flat_buffers`` of an equal one returned."""
    buffers = list(model.buffers())
    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
        buffer.copy_(values.view_as(buffer))
