"""Models on PyTorch's meta device, on which tensors have a shape and no memory."""

import copy

import torch
from torch import Tensor, nn


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device: all layers and shapes, no values; hooks do nothing."""
    plain = (v for module in model.modules() for v in vars(module).values())
    tensors = (*model.parameters(), *model.buffers(), *(v for v in plain if isinstance(v, Tensor)))
    # deepcopy takes what is in its memo as already copied.
    memo = {id(tensor): _meta(tensor) for tensor in tensors}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        # Hooks may read values, which meta tensors do not have.
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.update(dict.fromkeys(hooks, lambda *_: None))
    return copied


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
