"""The cost of each layer of a model: measured seconds and bytes, or counted FLOPs."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.costs.planner import LayerCost, Profile, cheapest_cuts
from labkit.engine import gpus
from labkit.workload.layers import HeldBytes, NonLeaf, Shape, input_dtype, layer_outputs, layers_of


def profile_layers(
    model: nn.Module,
    batch_size: int,
    input_shape: Shape,
    *,
    repeats: int = 5,
    device: str | torch.device = "cpu",
    name: str = "",
) -> Profile:
    """Measure the costs of each layer for a batch, in this process: medians over the repeats.

    The model is a chain of layers; it is copied, and only its shapes matter. One more pass through
    it comes before, to warm up. ``input_shape`` is that of one sample.
    """
    layers = layers_of(copy.deepcopy(model).to(device).train())
    inputs = torch.randn((batch_size, *input_shape), dtype=input_dtype(model), device=device)
    passes = [list(_one_pass(layers, inputs)) for _ in range(repeats + 1)]
    costs = []
    for measured in zip(*passes[1:]):
        cost = replace(
            measured[0],
            forward_s=statistics.median(cost.forward_s for cost in measured),
            backward_s=statistics.median(cost.backward_s for cost in measured),
            held_bytes=max(cost.held_bytes for cost in measured),
        )
        costs.append(cost)
    return Profile(name or type(model).__name__, batch_size, inputs.nbytes, tuple(costs))


def _one_pass(layers: list[nn.Module], value: Tensor) -> Iterator[LayerCost]:
    held = HeldBytes(nn.ModuleList(layers))
    for index, layer in enumerate(layers):
        entering = value.detach().requires_grad_(index > 0)
        before = held.num_bytes
        with held:
            forward_s, value = _timed(layer, NonLeaf.apply(entering))
        backward_s = 0.0
        if value.requires_grad:
            backward_s, _ = _timed(torch.autograd.backward, value, torch.ones_like(value))
        yield LayerCost(
            type(layer).__name__,
            forward_s,
            backward_s,
            output_bytes=value.nbytes,
            parameter_bytes=sum(parameter.nbytes for parameter in layer.parameters()),
            held_bytes=held.num_bytes - before,
        )


def _timed(fn: Callable[..., Any], *args: Tensor) -> tuple[float, Any]:
    gpus.synchronize(args[0].device)
    start_s = time.perf_counter()
    result = fn(*args)
    gpus.synchronize(args[0].device)
    return time.perf_counter() - start_s, result


def even_split(
    model: nn.Module, input_shape: Shape, num_stages: int, dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Split points that minimize the forward FLOPs of the stage with the most.

    They are counted, so every process finds the same split, without a measurement. The model is a
    chain of at least ``num_stages`` layers; ``input_shape`` and ``dtype`` are those of one sample.
    """
    # Not at the top: few need it, and it imports Triton.
    from torch.utils.flop_counter import FlopCounterMode

    # One real sample: on the meta device, convolutions import PyTorch's compiler first (seconds).
    sample = torch.zeros((1, *input_shape), dtype=dtype or input_dtype(model))
    with FlopCounterMode(display=False) as counter:
        outputs = layer_outputs(copy.deepcopy(model), sample)
        try:
            totals = [counter.get_total_flops() for _ in outputs]
        except Exception as error:
            raise ValueError(
                "split points are found by a sample of zeros, which the model does not take: "
                f"{error}. Give split_points"
            ) from error
    flops = [total - before for before, total in itertools.pairwise([0, *totals])]

    def stage_flops(stage: int, start: int, end: int) -> float:
        return sum(flops[start:end])

    _, points = cheapest_cuts(stage_flops, len(flops), num_stages, max)
    return points
