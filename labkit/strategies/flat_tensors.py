"""Several tensors as one: one message carries all of it, and it can be cut anywhere."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor [N] with the values of ``tensors``, one after the other."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` [N] in the shapes of ``tensors``, one after the other."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors)]


class FlatGradients:
    """The gradients of ``parameters`` as one tensor ``flat`` [N], to sum them over ranks.

    ``flat`` has the widest of their dtypes. Keep it if it is large: new memory in each step takes
    longer than the copies.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        num_elements = sum(parameter.numel() for parameter in parameters)
        dtype = functools.reduce(torch.promote_types, [p.dtype for p in parameters])
        self.flat = torch.empty(num_elements, dtype=dtype, device=parameters[0].device)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """Copy the gradients, zeros for a missing one, into ``flat``, and return it."""
        for view, parameter in zip(views_of(self.flat, self.parameters), self.parameters):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad.to_dense())
        return self.flat

    def hand_back(self) -> None:
        """Give the parameters the values of ``flat`` as gradients: views, or of another dtype."""
        for view, parameter in zip(views_of(self.flat, self.parameters), self.parameters):
            parameter.grad = view.to(parameter.dtype)


def lay_end_to_end(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Move parameters (and buffers) into one flat tensor, and make them views of it.

    Returns values [N] and gradients [N], zeros, to which backward adds: the parameters' ``grad``
    are views. Reset them with ``gradients.zero_()``: an optimizer's ``zero_grad`` would remove the
    views. ValueError for tensors of several dtypes.
    """
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            f"parameters and buffers of {', '.join(sorted(dtypes))} cannot lie end to end in one "
            "tensor: give all of them one dtype, or use ddp, ring_all_reduce or sharded"
        )
    values = flatten(tensors)
    gradients = torch.zeros_like(values)
    views = zip(tensors, views_of(values, tensors), views_of(gradients, tensors))
    for tensor, value, gradient in views:
        tensor.data = value
        if tensor.requires_grad:
            tensor.grad = gradient
    return values, gradients
