"""The stages of a model that one rank holds: their layers, and a step's actions on them.

Rank s of P holds stage s. Going forward it receives an activation from rank s - 1, runs its
layers, and sends the output to rank s + 1; going backward it receives the gradient of that
output, and sends the gradient of its own input to rank s - 1. Autograd sees none of these hops:
each stage's graph begins with a leaf and ends with a tensor whose gradient is passed to backward.

A rank may hold V stages: its **chunk** c is stage c P + s, and rank P - 1 sends on to rank 0.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast, naive_all_reduce
from labkit.engine.comm.comm import Comm, SubComm
from labkit.schedules.pipeline import Action, Hop, messages_of
from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.schedules.timetable import instructions
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.hops import Hops
from labkit.strategies.layer_graphs import LayerGraphs
from labkit.strategies.recompute import ForwardState
from labkit.strategies.saved_state import State
from labkit.strategies.traits import Division, Traits
from labkit.workload.layers import HeldBytes, NonLeaf, meta_copy, named_layers, output_shapes


class MemoryMeter:
    """Measures ``peak_bytes``, the most bytes that a rank keeps for backwards at one time.

    ``kept`` are the counters, by stage and micro-batch: ``HeldBytes`` or ``LayerGraphs``.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.is_on = True
        self.peak_bytes = 0
        self.kept: dict[tuple[int, int], Any] = {}

    def counting(self) -> Any:
        """A context in which a ``HeldBytes`` counts what forwards keep; None if it is off."""
        return HeldBytes(self.module) if self.is_on else contextlib.nullcontext()

    def note_peak(self) -> None:
        if self.is_on:
            live_bytes = sum(counter.num_bytes for counter in self.kept.values())
            self.peak_bytes = max(self.peak_bytes, live_bytes)


class Stage:
    """The layers of stage ``index``, and the tensors kept for backward, by micro-batch.

    ``strategy`` is all that the rank holds; ``entering`` and ``leaving`` are the layers' inputs
    and outputs, of the last stage the loss.
    """

    def __init__(self, strategy: "StagedModel", layers: nn.Sequential, index: int):
        self.strategy = strategy
        self.layers = layers
        self.index = index
        self.is_last = index + 1 == strategy.num_stages
        self.has_backward = index >= strategy.first_trained
        self.returns_gradient = index > strategy.first_trained
        self.forget()

    def forget(self) -> None:
        """Drop what is kept of all micro-batches."""
        self.entering: dict[int, Tensor] = {}
        self.leaving: dict[int, Tensor] = {}
        self.graphs: dict[int, LayerGraphs] = {}
        self.states: dict[int, ForwardState] = {}

    def run(self, inputs: Tensor) -> Tensor:
        """The layers' output, in the dtype in which it crosses a cut or enters the loss."""
        with self.strategy.precision.autocast(self.strategy.comm.device):
            outputs = self.layers(NonLeaf.apply(inputs))
        return self.as_output(outputs)

    def as_output(self, outputs: Tensor) -> Tensor:
        if self.is_last:
            return self.strategy.precision.wide(outputs)
        return outputs.to(self.strategy.crossing_dtype(outputs.dtype))

    def forward(self, micro_batch: int, entering: Tensor) -> Tensor:
        """Run the layers, and on the last stage the loss; returns what leaves, detached."""
        strategy = self.strategy
        with strategy.comm.span("forward"):
            # A leaf, which collects a gradient if one has to be sent back.
            entering.requires_grad_(self.returns_gradient)
            self.entering[micro_batch] = entering
            if strategy.recompute and self.has_backward:
                leaving = self._forward_without_graph(micro_batch)
            else:
                leaving = self._forward_with_graph(micro_batch)
                self.leaving[micro_batch] = leaving
        strategy.meter.note_peak()
        if not self.has_backward:
            # Nothing that a frozen stage was given or made is needed again.
            del self.entering[micro_batch]
            del self.leaving[micro_batch]
        return leaving.detach()

    def _forward_without_graph(self, micro_batch: int) -> Tensor:
        entering = self.entering[micro_batch]
        state = ForwardState(self.layers, self.strategy.comm.device)
        self.states[micro_batch] = state
        # A copy, because the first layer may work in place.
        with torch.no_grad():
            leaving = self.run(entering.clone())
        if self.strategy.meter.is_on:
            counter = HeldBytes(self.strategy.module)
            for tensor in (entering, *(copy for _, _, copy in state.buffers)):
                counter.keep(tensor)
            self.strategy.meter.kept[self.index, micro_batch] = counter
        return leaving

    def _forward_with_graph(self, micro_batch: int) -> Tensor:
        """Return what backward begins with: the layers' output, on the last stage the loss."""
        strategy = self.strategy
        entering = self.entering[micro_batch]
        loss = partial(strategy.scaled_loss, targets=strategy.targets[micro_batch])
        if strategy.cuts_backward:
            graphs = LayerGraphs(entering, strategy.meter.counting)
            self.graphs[micro_batch] = graphs
            strategy.meter.kept[self.index, micro_batch] = graphs
            with strategy.precision.autocast(strategy.comm.device):
                for layer in self.layers:
                    graphs.add(layer)
            graphs.add(self.as_output)
            if self.is_last:
                graphs.add(loss)
            return graphs.leaving
        with strategy.meter.counting() as counter:
            leaving = self.run(entering)
            if self.is_last:
                leaving = loss(leaving)
        if counter:
            strategy.meter.kept[self.index, micro_batch] = counter
        return leaving

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Compute the gradient of the stage's input from the ``gradient`` of its output.

        On the last stage that is None. If a backward is cut in two, the gradients of the weights
        are left to ``backward_weight``.
        """
        strategy = self.strategy
        with strategy.comm.span("backward_input" if strategy.cuts_backward else "backward"):
            if strategy.recompute:
                with self.states.pop(micro_batch).restored():
                    self.leaving[micro_batch] = self._forward_with_graph(micro_batch)
                strategy.meter.note_peak()
            entering = self.entering.pop(micro_batch)
            leaving = self.leaving.pop(micro_batch)
            if strategy.cuts_backward:
                input_gradient = self.graphs[micro_batch].backward_input(gradient)
                strategy.meter.note_peak()
                return input_gradient
            torch.autograd.backward(leaving, gradient)
            strategy.meter.kept.pop((self.index, micro_batch), None)
            return entering.grad

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the gradients of the weights, the second half of ``backward``."""
        with self.strategy.comm.span("backward_weight"):
            self.graphs.pop(micro_batch).backward_weight()
            self.strategy.meter.kept.pop((self.index, micro_batch))


@dataclass(eq=False)
class StagedModel(Strategy):
    """The base of the techniques that cut a model into stages; they add ``step``.

    Every rank is given the same seeded model and keeps its own layers. A parameter that layers on
    several stages share is on each of them; ``update`` sums its gradients first. No gradient
    crosses a cut if nothing before it is trained. With ``amp``, float32 crosses a cut in the half
    dtype.

    With ``recompute`` (activation checkpointing; Chen et al., "Training deep nets with sublinear
    memory cost", 2016, section 4) a forward keeps the stage's input alone (and copies of its
    buffers), and backward begins with the same forward again: see ``ForwardState``.

    Attributes:
        split_points: layers that begin a stage, one fewer than there are stages.
        stage_comm: the Comm of the ranks that have stages, in the order of their first ones.
        stage_rank, num_stages: s and P V.
        stages, module: by chunk this rank's stages; the layers of all of them.
        first_trained: the first stage that trains anything.
        loss_sum: the sum of the losses so far in this step, on the last stage.
        meter: counts the bytes kept for backwards, in the first step.
        stages_per_rank, cuts_backward: V; whether a backward is two actions.
        hops_beside: whether messages move beside the actions, in the order of the instructions.
    """

    split_points: Sequence[int] = ()
    amp: str | None = field(default=None, kw_only=True)
    recompute: bool = field(default=False, kw_only=True)
    traits = Traits(takes_whole_batch=True, division=Division.LAYERS)
    stages_per_rank = 1
    cuts_backward = False
    hops_beside = False

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        # The shapes of all layers, without the other stages' memory.
        self.meta_model = meta_copy(model)
        self.comm = comm
        self.stage_comm = self.lay_out(comm, model)
        self.stage_rank = self.stage_comm.rank
        self.num_ranks = self.stage_comm.world_size
        self.num_stages = self.num_ranks * (self.stages_per_rank or 1)
        self.is_first = self.stage_rank == 0
        self.is_last = self.stage_rank == self.num_ranks - 1
        self._take_stages(model)
        self._take_tensors(model)
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = make_optimizer(self.trained) if self.trained else None
        self.norm_ranks = range(self.num_ranks)
        self.meter = MemoryMeter(self.module)
        self._is_running = False  # a step
        self._boundaries: dict[tuple[Any, ...], list[Tensor]] = {}

    def _take_stages(self, model: nn.Module) -> None:
        """Keep this rank's layers, and move them to its device."""
        layers = named_layers(model)
        self.split_points = check_split_points(self.split_points, len(layers), self.num_stages)
        self.bounds = stage_bounds(self.split_points, len(layers))
        all_stages = [nn.ModuleList(layer for _, layer in layers[a:b]) for a, b in self.bounds]
        trains = [any(p.requires_grad for p in stage.parameters()) for stage in all_stages]
        self.first_trained = trains.index(True)
        by_rank = [all_stages[rank :: self.num_ranks] for rank in range(self.num_ranks)]
        self.tied = tied_parameters([nn.ModuleList(stages) for stages in by_rank])
        self.counted_elsewhere = {p for p, ranks in self.tied if self.stage_rank != ranks[0]}
        self.stages = []
        for chunk, stage_layers in enumerate(by_rank[self.stage_rank]):
            index = chunk * self.num_ranks + self.stage_rank
            self.stages.append(Stage(self, nn.Sequential(*stage_layers), index))
        self.module = nn.Sequential(*(stage.layers for stage in self.stages))
        self.module.to(self.comm.device).train()

    def _take_tensors(self, model: nn.Module) -> None:
        """Name this rank's parameters and buffers as the model does."""
        # By name of a parameter or buffer, the rank that holds it.
        self.rank_of: dict[str, int] = {}
        layers = named_layers(model)
        for stage, (start, end) in enumerate(self.bounds):
            for name, layer in layers[start:end]:
                for key in layer.state_dict():
                    self.rank_of[f"{name}.{key}"] = stage % self.num_ranks
        state = model.state_dict(keep_vars=True)
        own = [key for key, rank in self.rank_of.items() if rank == self.stage_rank]
        self.tensors = {key: state[key] for key in own}
        names = {parameter: name for name, parameter in model.named_parameters()}
        held = [value for value in self.tensors.values() if isinstance(value, nn.Parameter)]
        self.parameters = {names[parameter]: parameter for parameter in held}

    def lay_out(self, comm: Comm, model: nn.Module) -> Comm:
        """Return the ranks that divide the stages; a mesh takes some, and may cut the layers."""
        return comm

    def unshard(self, tensor: Tensor) -> Tensor:
        """Return the whole parameter or buffer; a mesh may have left this rank a shard of it."""
        return tensor.detach()

    def start(
        self, inputs: Tensor, targets: Tensor, batch_size: int, micro_batches: int = 1
    ) -> int:
        """Begin a step: cut the batch into micro-batches, as evenly as possible; returns how many.

        All ranks have the batch: the first stage uses the inputs, the last one the targets.
        """
        if self._is_running and self.num_ranks > 1:
            raise ValueError(
                "an exception has ended this rank's last step before its end: other stages may "
                "have sent messages of that step, which would be taken for those of this one. "
                "Begin a new run, for example from a checkpoint"
            )
        self._is_running = True
        count = min(micro_batches, len(targets))
        self.inputs = inputs.tensor_split(max(1, count))
        self.targets = targets.tensor_split(max(1, count))
        self._batch_size = batch_size
        self.loss_sum = targets.new_zeros((), dtype=torch.float64)
        self.hops = Hops(self.stage_comm, beside=self.hops_beside)
        self.meter.kept.clear()
        for stage in self.stages:
            stage.forget()
        for parameter in self.trained:
            parameter.grad = None
        return count

    def run_step(
        self, inputs: Tensor, targets: Tensor, batch_size: int, schedule: str, micro_batches: int
    ) -> Tensor:
        """Execute this rank's ``instructions`` of a step, and update; returns ``loss_sum``."""
        count = self.start(inputs, targets, batch_size, micro_batches)
        program = instructions(
            schedule,
            self.stage_rank,
            num_ranks=self.num_ranks,
            num_micro_batches=count,
            first_trained=self.first_trained,
            stages_per_rank=self.stages_per_rank,
        )
        for instruction in program:
            if isinstance(instruction, Hop):
                self._run_hop(instruction)
            else:
                self._run_action(instruction)
        self.hops.wait()
        self.update()
        return self.loss_sum

    def _run_action(self, action: Action) -> None:
        stage = self.stages[action.chunk]
        micro_batch = action.micro_batch
        if action.kind == "backward_weight":
            stage.backward_weight(micro_batch)
            return
        needed, made = messages_of(
            action,
            self.stage_rank,
            num_ranks=self.num_ranks,
            num_stages=self.num_stages,
            first_trained=self.first_trained,
        )
        received = self.hops.take(needed) if needed else None
        if action.kind == "forward":
            entering = self.inputs[micro_batch] if received is None else received
            result = stage.forward(micro_batch, entering)
        else:
            result = stage.backward(micro_batch, received)
        if made:
            assert result is not None, "the layers use their input"
            self.hops.hand_on(made, result)

    def _run_hop(self, hop: Hop) -> None:
        landing = None
        if hop.recv:
            # The gradient of a stage's output is as large as what enters the next stage.
            stage = self.stages[hop.recv.chunk].index + (hop.recv.kind == "gradient")
            meta_tensor = self.boundary(self.inputs[hop.recv.micro_batch], stage)
            landing = torch.empty_like(meta_tensor, device=self.comm.device)
        self.hops.run(hop, landing)

    def scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that backward begins with; the loss itself is added to ``loss_sum``."""
        loss = self.loss(outputs, targets)
        self.loss_sum += loss.detach()
        return loss * (self.precision.scaler.scale / self._batch_size)

    def update(self) -> bool:
        self.meter.is_on = False
        self._is_running = False
        self.weigh(self._batch_size)
        for parameter, ranks in self.tied:
            if self.stage_rank in ranks:
                gradient = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    gradient = parameter.grad.contiguous()
                parameter.grad = naive_all_reduce(SubComm(self.stage_comm, ranks), gradient)
        return super().update()

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode on the last stage, None on the others."""
        value = inputs
        self.module.eval()
        for stage in self.stages:
            if stage.index > 0 and self.num_ranks > 1:
                meta_tensor = self.boundary(inputs, stage.index)
                value = torch.empty_like(meta_tensor, device=self.comm.device)
                self.stage_comm.recv(value, (self.stage_rank - 1) % self.num_ranks)
            value = stage.run(value)
            if not stage.is_last and self.num_ranks > 1:
                self.stage_comm.send(value, (self.stage_rank + 1) % self.num_ranks)
        self.module.train()
        return value if self.is_last else None

    def held(self) -> tuple[State, dict[str, nn.Parameter]]:
        return self.tensors, self.parameters

    def full_state(self) -> State:
        """All stages' parameters and buffers, on every rank: each rank broadcasts its own."""
        state = State()
        for key, meta_tensor in self.meta_model.state_dict().items():
            value = torch.empty_like(meta_tensor, device=self.comm.device)
            if self.rank_of[key] == self.stage_rank:
                value.copy_(self.unshard(self.tensors[key]))
            state[key] = broadcast(self.stage_comm, value, root=self.rank_of[key]).cpu()
        return state

    def notes(self) -> dict[str, Any]:
        """The split points."""
        return {"split_points": list(self.split_points)}

    def crossing_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an activation crosses a cut."""
        return self.precision.half if self.precision.half and dtype == torch.float32 else dtype

    def boundary(self, inputs: Tensor, stage: int) -> Tensor:
        """On the meta device, what enters ``stage`` if ``inputs`` [n, ...] enter the model.

        For the stage after the last that is the model's outputs.
        """
        key = inputs.shape, inputs.dtype
        if key not in self._boundaries:
            samples, *sample_shape = inputs.shape
            shapes = output_shapes(self.meta_model, tuple(sample_shape), samples, inputs.dtype)
            entering = [inputs.to("meta")]
            for number, (_, end) in enumerate(self.bounds, start=1):
                shape, dtype = shapes[end - 1]
                if number < self.num_stages:
                    dtype = self.crossing_dtype(dtype)
                entering.append(torch.empty(shape, dtype=dtype, device="meta"))
            self._boundaries[key] = entering
        return self._boundaries[key][stage]


def tied_parameters(ranks: Sequence[nn.Module]) -> list[tuple[nn.Parameter, list[int]]]:
    """The trained parameters that several ranks' layers share, each with the list of its ranks.

    Raises:
        ValueError: two ranks share a buffer, whose statistics they cannot both keep.
    """
    holders: dict[Tensor, list[int]] = {}
    for rank, layers in enumerate(ranks):
        for tensor in dict.fromkeys((*layers.parameters(), *layers.buffers())):
            holders.setdefault(tensor, []).append(rank)
    tied = []
    for tensor, sharing in holders.items():
        if len(sharing) == 1:
            continue
        if not isinstance(tensor, nn.Parameter):
            raise ValueError(
                f"a buffer {list(tensor.shape)} belongs to layers on stages {sharing}: move a "
                "split point, so that one stage has both"
            )
        if tensor.requires_grad:
            tied.append((tensor, sharing))
    return tied
