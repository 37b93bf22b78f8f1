"""A model on paper: which rank has which layers, and what crosses the cuts between them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.strategies.precision import Precision
from labkit.workload.layers import named_layers, output_shapes


class Partition:
    """The P V stages of a model on P ranks; rank s has the stages s, s + P, ...

    Args:
        meta_model: the model on the meta device: names and shapes of all layers, without memory.
        split_points: layers that begin a stage, one fewer than there are stages.
        precision: decides the dtype in which an activation crosses a cut.

    Attributes:
        bounds: by stage, its layers (start, end), end excluded.
        first_trained: the first stage that trains anything; their number if none does.
        rank_of: by name of a parameter or buffer, the rank that has it.
        tied: by name of a trained parameter that several ranks' layers share, these ranks.
    """

    def __init__(
        self,
        meta_model: nn.Module,
        split_points: Sequence[int],
        num_ranks: int,
        stages_per_rank: int,
        precision: Precision,
    ):
        self.meta_model = meta_model
        self.precision = precision
        self.num_ranks = num_ranks
        self.num_stages = num_ranks * stages_per_rank
        layers = named_layers(meta_model)
        self.split_points = check_split_points(split_points, len(layers), self.num_stages)
        self.bounds = stage_bounds(self.split_points, len(layers))
        self.rank_of: dict[str, int] = {}
        layers_by_rank = [nn.ModuleList() for _ in range(num_ranks)]
        trained_stages = []
        for stage, (start, end) in enumerate(self.bounds):
            rank = stage % num_ranks
            for name, layer in layers[start:end]:
                layers_by_rank[rank].append(layer)
                if any(parameter.requires_grad for parameter in layer.parameters()):
                    trained_stages.append(stage)
                for key in layer.state_dict():
                    self.rank_of[f"{name}.{key}"] = rank
        self.first_trained = min(trained_stages, default=self.num_stages)
        self.tied = self._find_tied(layers_by_rank)
        self._boundaries: dict[tuple[Any, ...], list[Tensor]] = {}

    def _find_tied(self, layers_by_rank: Sequence[nn.Module]) -> dict[str, list[int]]:
        """Return ``tied``; ValueError for a buffer: two ranks cannot both keep its statistics."""
        ranks_of: dict[Tensor, list[int]] = {}
        for rank, layers in enumerate(layers_by_rank):
            for tensor in dict.fromkeys((*layers.parameters(), *layers.buffers())):
                ranks_of.setdefault(tensor, []).append(rank)
        names: dict[Tensor, str] = {}
        for name, parameter in self.meta_model.named_parameters():
            names[parameter] = name
        tied = {}
        for tensor, ranks in ranks_of.items():
            if len(ranks) > 1 and tensor not in names:
                raise ValueError(
                    f"a buffer {list(tensor.shape)} belongs to layers on stages {ranks}: move a "
                    "split point, so that one stage has both"
                )
            if len(ranks) > 1 and tensor.requires_grad:
                tied[names[tensor]] = ranks
        return tied

    def stages_of(self, rank: int) -> range:
        """The stages of a rank, by chunk."""
        return range(rank, self.num_stages, self.num_ranks)

    def boundary(self, inputs: Tensor, stage: int) -> Tensor:
        """The meta tensor that enters ``stage`` if ``inputs`` [n, ...] enter the model.

        The stage after the last stands for the model's outputs.
        """
        key = inputs.shape, inputs.dtype
        if key not in self._boundaries:
            samples, *sample_shape = inputs.shape
            shapes = output_shapes(self.meta_model, tuple(sample_shape), samples, inputs.dtype)
            entering = [inputs.to("meta")]
            for number, (_, end) in enumerate(self.bounds, start=1):
                shape, dtype = shapes[end - 1]
                if number < self.num_stages:
                    dtype = self.precision.crossing_dtype(dtype)
                entering.append(torch.empty(shape, dtype=dtype, device="meta"))
            self._boundaries[key] = entering
        return self._boundaries[key][stage]
