"""What each layer of a model costs, measured: seconds, and bytes kept for backward."""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit import gpus
from labkit.placement.stage_costs import LayerCost, Profile
from labkit.workload.layers import (
    HeldBytes,
    NonLeaf,
    Shape,
    input_dtype,
    layers_of,
    output_shapes,
)


def profile_layers(
    model: nn.Module,
    batch_size: int,
    input_shape: Shape,
    *,
    repeats: int = 5,
    device: str | torch.device = "cpu",
    name: str = "",
    dtype: torch.dtype | None = None,
) -> Profile:
    """Measure what each layer costs for a batch, in this process: medians over the repeats.

    Args:
        model: a chain of layers; it is copied, and only its shapes matter.
        batch_size: samples.
        input_shape: of one sample.
        repeats: measured passes through the model, after one to warm up.
        device: where the layers run.
        name: of the model in the result; by default its class name.
        dtype: of the samples, as in ``output_shapes``.

    Raises:
        ValueError: as ``output_shapes``, or fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"{repeats} repeats measure nothing: give 1 or more")
    dtype = dtype or input_dtype(model)
    outputs = output_shapes(model, input_shape, batch_size, dtype)
    layers = layers_of(copy.deepcopy(model).to(device).train())
    # Integer samples are zeros: every nn.Embedding has a row 0.
    make = torch.randn if dtype.is_floating_point or dtype.is_complex else torch.zeros
    inputs = make((batch_size, *input_shape), dtype=dtype, device=device)
    passes = [_one_pass(layers, inputs) for _ in range(repeats + 1)][1:]
    costs = []
    for layer, (shape, output_dtype), measured in zip(layers, outputs, zip(*passes)):
        forward_s, backward_s, held_bytes = zip(*measured)
        seconds = statistics.median(forward_s), statistics.median(backward_s)
        output_bytes = shape.numel() * output_dtype.itemsize
        parameter_bytes = sum(p.nbytes for p in layer.parameters())
        sizes = output_bytes, parameter_bytes, max(held_bytes)
        costs.append(LayerCost(type(layer).__name__, *seconds, *sizes))
    return Profile(name or type(model).__name__, batch_size, inputs.nbytes, tuple(costs))


def _one_pass(layers: list[nn.Module], inputs: Tensor) -> list[tuple[float, float, int]]:
    """By layer: seconds of forward, seconds of backward, and bytes kept between the two."""
    found, value, held = [], inputs, HeldBytes(nn.ModuleList(layers))
    for index, layer in enumerate(layers):
        entering = value.detach().requires_grad_(index > 0 and value.is_floating_point())
        before = held.num_bytes
        with held:
            forward_s, value = _timed(layer, NonLeaf.apply(entering))
        backward_s = 0.0
        if value.requires_grad:
            backward_s, _ = _timed(torch.autograd.backward, value, torch.ones_like(value))
        found.append((forward_s, backward_s, held.num_bytes - before))
    return found


def _timed(fn: Callable, *args: Tensor) -> tuple[float, Any]:
    gpus.synchronize(args[0].device)
    start_s = time.perf_counter()
    result = fn(*args)
    gpus.synchronize(args[0].device)
    return time.perf_counter() - start_s, result
