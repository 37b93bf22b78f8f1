"""A split by counted FLOPs: every process finds the same split, without a measurement."""

import copy
import itertools

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.costs.link import Link
from labkit.placement.planner import best_split
from labkit.placement.stage_costs import LayerCost, Profile
from labkit.workload.layers import Shape, input_dtype, layer_outputs


def even_split(
    model: nn.Module, input_shape: Shape, num_stages: int, dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Split points that minimise the forward FLOPs of the stage with the most.

    ``best_split`` of a measured profile also takes the machine into account.

    Args:
        model: a chain of layers; it is not changed.
        input_shape, dtype: of one sample, as in ``output_shapes``.
        num_stages: P.

    Raises:
        ValueError: fewer layers than stages, or as ``output_shapes``.
    """
    # One real sample: on the meta device, convolutions import PyTorch's compiler first (seconds).
    sample = torch.zeros((1, *input_shape), dtype=dtype or input_dtype(model))
    with FlopCounterMode(display=False) as counter:
        totals = [counter.get_total_flops() for _ in layer_outputs(copy.deepcopy(model), sample)]
    flops = [total - before for before, total in itertools.pairwise([0, *totals])]
    layers = tuple(LayerCost(str(i), count, 0.0, 0, 0, 0) for i, count in enumerate(flops))
    counted = Profile(type(model).__name__, 1, 0, layers)
    free = Link(0.0, 0.0)
    return best_split(counted, num_stages, free, objective="largest_stage").split_points
