"""A model as a list of layers: what can be cut, and what crosses a cut.

Shapes come from PyTorch's meta device, on which tensors have a shape and no memory.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of an ``nn.Sequential`` in the order in which they run.

    A nested ``nn.Sequential`` is replaced by its layers, unless it has hooks: then it stays one
    layer, so that its hooks run.

    Raises:
        ValueError: a model that is not a chain of layers, has none, or has hooks as a whole.
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
            f"hooks on this {type(model).__name__} would not run, because its layers run one by "
            "one: register them on its layers"
        )
    found: list[tuple[str, nn.Module]] = []
    # named_children() would leave out repetitions of a layer.
    for name in model._modules:
        child = model.get_submodule(name)
        if _is_chain(child) and child._modules and not _has_hooks(child):
            found += [(f"{name}.{inner}", layer) for inner, layer in named_layers(child)]
        else:
            found.append((name, child))
    if not found:
        raise ValueError("this nn.Sequential has no layers: there is nothing to place")
    return found


def _is_chain(module: nn.Module) -> bool:
    # A subclass that overrides forward may do anything between the layers.
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def output_shapes(
    model: nn.Module, input_shape: Shape, batch_size: int = 1, dtype: torch.dtype | None = None
) -> list[tuple[torch.Size, torch.dtype]]:
    """The shape [batch_size, ...] and the dtype of each layer's output.

    Args:
        model: a chain of layers, on any device; it is not changed.
        input_shape: of one sample.
        batch_size: samples.
        dtype: of the samples; ``input_dtype(model)`` by default.

    Raises:
        ValueError: not a chain of layers, or one that does not take this shape; the message names
            the layer.
    """
    dtype = dtype or input_dtype(model)
    inputs = torch.empty((batch_size, *input_shape), dtype=dtype, device="meta")
    return [(output.shape, output.dtype) for output in layer_outputs(meta_copy(model), inputs)]


def input_dtype(model: nn.Module) -> torch.dtype:
    """int64 if the first layer is an ``nn.Embedding``, else the dtype of the first parameter."""
    if isinstance(layers_of(model)[0], nn.Embedding | nn.EmbeddingBag):
        return torch.int64
    return next((p.dtype for p in model.parameters()), torch.float32)


def layer_outputs(model: nn.Module, value: Tensor) -> Iterator[Tensor]:
    """Run the layers one by one in evaluation mode, where one sample is enough for BatchNorm.

    Raises:
        ValueError: a layer does not take its input, or returns something other than one tensor.
    """
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
                f"layer {index} ({type(layer).__name__}) returns a {type(value).__name__}: "
                "every layer must return one tensor"
            )
        yield value


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
