"""A model as a list of layers: what can be cut, and what crosses a cut.

Shapes come from PyTorch's meta device, on which tensors have a shape and no memory.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of an ``nn.Sequential`` in the order in which they run; nested ones are opened.

    A nested one with hooks of its own stays one layer, so that they run.

    Raises:
        ValueError: a model that is no chain of layers, has none, or has hooks as a whole.
    """
    return [layer for _, layer in named_layers(model)]


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """``layers_of`` with their names in the model: ``"0"``, or ``"0.1"`` in a nested one.

    Raises:
        ValueError: as ``layers_of``.
    """
    if not _is_chain(model):
        raise ValueError(
            f"{type(model).__name__} is not an nn.Sequential, and only a chain of layers can be "
            "cut between any two: wrap its parts in nn.Sequential, a block with a skip connection "
            "as one layer"
        )
    if _has_hooks(model):
        raise ValueError(
            f"hooks on this {type(model).__name__} would not run, because nothing runs it whole "
            "once it is cut: register them on its layers"
        )
    found: list[tuple[str, nn.Module]] = []
    # named_children() would leave out a layer that comes twice.
    for name, child in model._modules.items():
        if _is_chain(child) and len(child) and not _has_hooks(child):
            found += [(f"{name}.{inner}", layer) for inner, layer in named_layers(child)]
        else:
            found.append((name, child))
    if not found:
        raise ValueError("this nn.Sequential has no layers: there is nothing to place")
    return found


def _is_chain(module: nn.Module) -> bool:
    # A subclass with a forward of its own may do anything between the layers.
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def output_shapes(
    model: nn.Module,
    input_shape: Shape,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
) -> list[tuple[torch.Size, torch.dtype]]:
    """By layer, the shape [batch_size, ...] and dtype of what it hands on.

    Args:
        model: a chain of layers, on any device; it stays as it is.
        input_shape: of one sample.
        batch_size: samples.
        dtype: of the samples; by default int64 where an ``nn.Embedding`` is the first layer, else
            that of the first parameter.

    Raises:
        ValueError: no chain of layers, or one that does not take this shape; the layer is named.
    """
    dtype = dtype or input_dtype(model)
    inputs = torch.empty((batch_size, *input_shape), dtype=dtype, device="meta")
    return [(output.shape, output.dtype) for output in walk(meta_copy(model), inputs)]


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device: the layers and all shapes, none of the values; hooks are idle."""
    plain = (v for module in model.modules() for v in vars(module).values())
    tensors = (*model.parameters(), *model.buffers(), *(v for v in plain if isinstance(v, Tensor)))
    # What deepcopy is told to be copied already it takes as it is.
    memo = {id(tensor): _meta(tensor) for tensor in tensors}
    ghost = copy.deepcopy(model, memo)
    for module in ghost.modules():
        # They look at values, or collect them, and want the real ones.
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.update(dict.fromkeys(hooks, _idle))
    return ghost


def _idle(*_) -> None:
    """A hook that does nothing."""


def _meta(tensor: Tensor) -> Tensor:
    ghost = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(ghost, requires_grad=tensor.requires_grad)
    return ghost


def input_dtype(model: nn.Module) -> torch.dtype:
    if isinstance(layers_of(model)[0], nn.Embedding | nn.EmbeddingBag):
        return torch.int64
    return next((p.dtype for p in model.parameters()), torch.float32)


def walk(model: nn.Module, value: Tensor) -> Iterator[Tensor]:
    """The output of each layer, in evaluation mode: one sample is enough for BatchNorm there."""
    for index, layer in enumerate(layers_of(model.eval())):
        takes = list(value.shape)
        try:
            with torch.no_grad():
                value = layer(value)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) does not take {takes}: {error}"
            ) from error
        if not isinstance(value, Tensor):
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) hands on a {type(value).__name__}: "
                "between layers there has to be one tensor"
            )
        yield value
