"""What each layer of a model costs: counted in FLOPs, or measured in seconds and bytes."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.costs.link import Link
from labkit.placement.planner import best_split
from labkit.placement.stage_costs import LayerCost, Profile
from labkit.workload.activations import HeldBytes, NoLeaf
from labkit.workload.layers import Shape, input_dtype, layers_of, output_shapes, walk


def even_split(
    model: nn.Module, input_shape: Shape, num_stages: int, dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Split points that make the largest stage's work as small as it can be, counted in FLOPs.

    Counted, not measured, so that every process finds the same; ``placement.best_split`` of a
    measured ``profile`` knows the machine, too. ``dtype`` as in ``output_shapes``.

    Raises:
        ValueError: fewer layers than stages, or what ``output_shapes`` raises.
    """
    # One real sample: on the meta device, convolutions import PyTorch's compiler first (seconds).
    sample = torch.zeros((1, *input_shape), dtype=dtype or input_dtype(model))
    with FlopCounterMode(display=False) as counter:
        totals = [counter.get_total_flops() for _ in walk(copy.deepcopy(model), sample)]
    flops = [total - before for before, total in itertools.pairwise([0, *totals])]
    layers = tuple(LayerCost(str(i), count, 0.0, 0, 0, 0) for i, count in enumerate(flops))
    counted = Profile(type(model).__name__, 1, 0, layers)
    free = Link(0.0, 0.0)
    return best_split(counted, num_stages, free, objective="largest_stage").split_points


def profile(
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
        model: a chain of layers; it is copied, and only its shapes count.
        batch_size: samples of the batch.
        input_shape: of one sample.
        repeats: counted passes through the model, after one that warms up.
        device: where to measure.
        name: of the model.
        dtype: of the samples, as in ``output_shapes``.

    Raises:
        ValueError: as ``output_shapes``; no repeats.
    """
    if repeats < 1:
        raise ValueError(f"{repeats} repeats measure nothing: give 1 or more")
    dtype = dtype or input_dtype(model)
    shapes = output_shapes(model, input_shape, batch_size, dtype)
    layers = layers_of(copy.deepcopy(model).to(device).train())
    # As whole numbers zeros: every nn.Embedding has a row 0.
    make = torch.randn if dtype.is_floating_point or dtype.is_complex else torch.zeros
    inputs = make((batch_size, *input_shape), dtype=dtype, device=device)
    passes = [_one_pass(layers, inputs) for _ in range(repeats + 1)][1:]
    costs = []
    for index, layer in enumerate(layers):
        forward_s, backward_s, held_bytes = zip(*(one[index] for one in passes))
        shape, output_dtype = shapes[index]
        costs.append(
            LayerCost(
                name=type(layer).__name__,
                forward_s=statistics.median(forward_s),
                backward_s=statistics.median(backward_s),
                output_bytes=shape.numel() * output_dtype.itemsize,
                parameter_bytes=sum(p.nbytes for p in layer.parameters()),
                held_bytes=max(held_bytes),
            )
        )
    return Profile(name or type(model).__name__, batch_size, inputs.nbytes, tuple(costs))


def _one_pass(layers: list[nn.Module], inputs: Tensor) -> list[tuple[float, float, int]]:
    """Layer by layer: seconds forward and backward, and bytes kept between the two."""
    found, value, held = [], inputs, HeldBytes(nn.ModuleList(layers))
    for index, layer in enumerate(layers):
        entering = value.detach().requires_grad_(index > 0 and value.is_floating_point())
        before = held.num_bytes
        with held:
            forward_s, value = _timed(layer, NoLeaf.apply(entering))
        backward_s = 0.0
        if value.requires_grad:
            gradient = torch.ones_like(value)
            backward_s, _ = _timed(torch.autograd.backward, value, gradient)
        found.append((forward_s, backward_s, held.num_bytes - before))
    return found


def _timed(fn: Callable, *args: Tensor) -> tuple[float, Any]:
    on_gpu = args[0].device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(args[0].device)
    start_s = time.perf_counter()
    result = fn(*args)
    if on_gpu:
        torch.cuda.synchronize(args[0].device)
    return time.perf_counter() - start_s, result
