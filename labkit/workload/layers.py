"""A model as a list of layers: what crosses a cut between two of them.

Shapes come from PyTorch's meta device, on which tensors have a shape and no memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from labkit.workload.chain import layers_of
from labkit.workload.meta import meta_copy

Shape = tuple[int, ...]


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
