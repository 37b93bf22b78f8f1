"""The stages of a model that one rank holds: their layers, and the hops to their neighbours.

Rank s of P holds stage s. Going forward it receives an activation from rank s - 1, runs its
layers, and sends the output to rank s + 1; going backward it receives the gradient of that
output, and sends the gradient of its own input to rank s - 1. Autograd sees none of these hops:
each stage's graph begins with a leaf and ends with a tensor whose gradient is passed to backward.

A rank may hold V stages: its **chunk** c is stage c P + s, and rank P - 1 sends on to rank 0.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast, naive_all_reduce
from labkit.comm.comm import Comm, SubComm
from labkit.comm.work import Work, work_queue_of
from labkit.schedules.pipeline import Hop
from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.strategies.base import MakeOptimizer, State, Strategy
from labkit.strategies.layer_graphs import LayerGraphs
from labkit.strategies.recompute import ForwardState
from labkit.workload.layers import HeldBytes, NonLeaf, meta_copy, named_layers, output_shapes

# A chunk of this rank, and a micro-batch.
Place = tuple[int, int]


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
        line: the Comm of the ranks that have stages, in the order of their first ones.
        index, num_stages: s and P V.
        chunks, module: by chunk this rank's layers; all of them.
        first_trained: the first stage that trains anything.
        loss_sum: the sum of the losses so far in this step, on the last stage.
        held_bytes: the most bytes that were kept for backwards at one time, measured in the first
            step.
        stages_per_rank, cuts_backward: V; whether a backward is two actions.
        hops_beside: whether messages move beside the actions, in the order of the instructions.
    """

    split_points: Sequence[int] = ()
    amp: str | None = field(default=None, kw_only=True)
    recompute: bool = field(default=False, kw_only=True)
    optimizes = "layers"
    takes_whole_batch = True
    stages_per_rank = 1
    cuts_backward = hops_beside = False

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        # The shapes of all layers, without the other stages' memory.
        self.meta_model = meta_copy(model)
        # Puts together what a mesh cuts.
        self.whole: Callable[[Tensor], Tensor] = Tensor.detach
        self.comm, self.line = comm, self.lay_out(comm, model)
        self.index, self.num_ranks = self.line.rank, self.line.world_size
        self.num_stages = self.num_ranks * (self.stages_per_rank or 1)
        self.is_first, self.is_last = self.index == 0, self.index == self.num_ranks - 1
        layers = named_layers(model)
        points = check_split_points(self.split_points, len(layers), self.num_stages)
        self.split_points, self.bounds = points, stage_bounds(points, len(layers))
        stages = [nn.ModuleList(layer for _, layer in layers[a:b]) for a, b in self.bounds]
        trains = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
        self.first_trained = trains.index(True)
        by_rank = [stages[rank :: self.num_ranks] for rank in range(self.num_ranks)]
        self.tied = tied_parameters([nn.ModuleList(held) for held in by_rank])
        self.counted_elsewhere = {p for p, places in self.tied if self.index != places[0]}
        # By name of a parameter or buffer, the rank that holds it.
        self.rank_of = {
            f"{name}.{key}": stage % self.num_ranks
            for stage, (start, end) in enumerate(self.bounds)
            for name, layer in layers[start:end]
            for key in layer.state_dict()
        }
        self.chunks = [nn.Sequential(*stage) for stage in by_rank[self.index]]
        self.module = nn.Sequential(*self.chunks).to(comm.device).train()
        state = model.state_dict(keep_vars=True)
        self.tensors = {key: state[key] for key, s in self.rank_of.items() if s == self.index}
        names = {p: name for name, p in model.named_parameters()}
        mine = [value for value in self.tensors.values() if isinstance(value, nn.Parameter)]
        self.parameters = {names[p]: p for p in mine}
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = make_optimizer(self.trained) if self.trained else None
        self.norm_ranks = range(self.num_ranks)
        self.held_bytes, self._measures = 0, True
        self._is_running = False  # a step
        self._boundaries: dict[tuple[Any, ...], list[Tensor]] = {}

    def lay_out(self, comm: Comm, model: nn.Module) -> Comm:
        """The ranks that have a stage each; in a mesh some ranks, and it may cut the layers."""
        return comm

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
        parts = max(1, count)
        self._inputs, self._targets = inputs.tensor_split(parts), targets.tensor_split(parts)
        self._batch_size = batch_size
        self.loss_sum = targets.new_zeros((), dtype=torch.float64)
        # By chunk and micro-batch: what the layers get and return, and the gradient of what they
        # return, then of what they got.
        self._entering, self._leaving, self._gradients = (dict[Place, Tensor]() for _ in range(3))
        # What is kept for backwards (``HeldBytes``, ``LayerGraphs``); receives and hops under way.
        self._held: dict[Place, Any] = {}
        self._before: dict[Place, ForwardState] = {}
        self.coming: dict[tuple[str, int, int], Work] = {}
        self.under_way: list[Work] = []
        for parameter in self.trained:
            parameter.grad = None
        return count

    def stage_at(self, chunk: int) -> int:
        """The stage that is this rank's ``chunk``."""
        return chunk * self.num_ranks + self.index

    def forward(self, micro_batch: int, chunk: int = 0) -> None:
        """Run the layers; the last stage also computes the loss."""
        place, stage = (chunk, micro_batch), self.stage_at(chunk)
        with self.comm.span("forward"):
            if stage == 0:
                self._entering[place] = self._inputs[micro_batch]
            # A leaf, which collects a gradient if one has to be sent back.
            entering = self._entering[place].requires_grad_(stage > self.first_trained)
            if self.recompute and stage >= self.first_trained:
                before = ForwardState(self.chunks[chunk], self.comm.device)
                self._before[place] = before
                # A copy, because the first layer may work in place.
                with torch.no_grad():
                    self._leaving[place] = self.run(entering.clone(), chunk)
                if self._measures:
                    self._held[place] = held = HeldBytes(self.module)
                    for kept in (entering, *(copy for _, _, copy in before.buffers)):
                        held.keep(kept)
            else:
                self._leaving[place] = self._run_for_backward(place)
            if self.num_ranks == 1 and stage + 1 < self.num_stages:
                self._entering[chunk + 1, micro_batch] = self._leaving[place].detach()
            if self.recompute and stage + 1 == self.num_stages:
                del self._leaving[place]
        self._note_held()

    def _run_for_backward(self, place: Place) -> Tensor:
        """What backward begins with: the layers' output, on the last stage the loss."""
        (chunk, micro_batch), entering = place, self._entering[place]
        loss = partial(self.scaled_loss, targets=self._targets[micro_batch])
        is_last = self.stage_at(chunk) + 1 == self.num_stages
        measured = partial(HeldBytes, self.module) if self._measures else contextlib.nullcontext
        if self.cuts_backward:
            graphs = self._held[place] = LayerGraphs(entering, measured)
            with self.autocast(self.comm.device):
                for layer in self.chunks[chunk]:
                    graphs.add(layer)
            graphs.add(partial(self.as_output, chunk=chunk))
            if is_last:
                graphs.add(loss)
            return graphs.leaving
        with measured() as self._held[place]:
            leaving = self.run(entering, chunk)
            return loss(leaving) if is_last else leaving

    def _note_held(self) -> None:
        held_now = [held.num_bytes for held in self._held.values()] if self._measures else []
        self.held_bytes = max(self.held_bytes, sum(held_now))

    def run(self, inputs: Tensor, chunk: int = 0) -> Tensor:
        """The layers' output, in the dtype in which it crosses a cut or enters the loss."""
        with self.autocast(self.comm.device):
            leaving = self.chunks[chunk](NonLeaf.apply(inputs))
        return self.as_output(leaving, chunk)

    def as_output(self, leaving: Tensor, chunk: int) -> Tensor:
        is_last = self.stage_at(chunk) + 1 == self.num_stages
        return self.wide(leaving) if is_last else leaving.to(self.crossing(leaving.dtype))

    def scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What backward begins with on the last stage; the loss itself is added to the sum."""
        loss = self.loss(outputs, targets)
        self.loss_sum += loss.detach()
        return loss * (self.scaler.scale / self._batch_size)

    def backward(self, micro_batch: int, chunk: int = 0) -> None:
        """Compute the gradient of the stage's input from the gradient of its output.

        If it is cut in two, the gradients of the weights are left to ``backward_weight``.
        """
        place = chunk, micro_batch
        with self.comm.span("backward_input" if self.cuts_backward else "backward"):
            # Of the last stage's output, the loss, there is none.
            gradient = self._gradients.pop(place, None)
            if self.recompute:
                with self._before.pop(place).restored():
                    self._leaving[place] = self._run_for_backward(place)
                self._note_held()
            entering, leaving = self._entering.pop(place), self._leaving.pop(place)
            if self.cuts_backward:
                of_input = self._held[place].backward_input(gradient)
                self._note_held()
            else:
                torch.autograd.backward(leaving, gradient)
                self._held.pop(place, None)
                of_input = entering.grad
            if self.stage_at(chunk) > self.first_trained:
                assert of_input is not None, "the layers use their input"
                self._gradients[chunk - (self.num_ranks == 1), micro_batch] = of_input

    backward_input = backward

    def backward_weight(self, micro_batch: int, chunk: int = 0) -> None:
        """The second half of ``backward``."""
        with self.comm.span("backward_weight"):
            self._held.pop((chunk, micro_batch)).backward_weight()

    def hop(self, hop: Hop) -> None:
        """Send, receive, or both at once; what lands is put where an action will look for it."""
        outgoing = landing = None
        if hop.send:
            place = hop.send.chunk, hop.send.micro_batch
            if hop.send.kind == "gradient":
                outgoing = self._gradients.pop(place)
            else:
                outgoing = self._leaving[place].detach()
                if self.recompute:
                    del self._leaving[place]
        if hop.recv:
            kind, micro_batch, _, chunk = hop.recv
            stage = self.stage_at(chunk) + (kind == "gradient")
            like = self.boundary(self._inputs[micro_batch], stage)
            landing = torch.empty_like(like, device=self.comm.device)
            lands_in = self._gradients if kind == "gradient" else self._entering
            lands_in[chunk, micro_batch] = landing
        if not self.hops_beside:
            carry_out(self.line, hop, outgoing, landing)
            return
        carry = partial(carry_out, hop=hop, outgoing=outgoing, landing=landing)
        tensors = [tensor for tensor in (outgoing, landing) if tensor is not None]
        work = work_queue_of(self.line).add("hop", carry, tensors, tensors)
        self.under_way.append(work)
        if hop.recv:
            self.coming[hop.recv.kind, hop.recv.micro_batch, hop.recv.chunk] = work

    def update(self) -> bool:
        self._measures = False
        self._is_running = False
        self.weigh(self._batch_size)
        for parameter, stages in self.tied:
            if self.index in stages:
                gradient = parameter.grad
                total = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
                parameter.grad = naive_all_reduce(SubComm(self.line, stages), total)
        return super().update()

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode on the last stage, None on the others."""
        value = inputs
        self.module.eval()
        for chunk in range(len(self.chunks)):
            stage = self.stage_at(chunk)
            if stage > 0 and self.num_ranks > 1:
                value = torch.empty_like(self.boundary(inputs, stage), device=self.comm.device)
                self.line.recv(value, (self.index - 1) % self.num_ranks)
            value = self.run(value, chunk)
            if stage + 1 < self.num_stages and self.num_ranks > 1:
                self.line.send(value, (self.index + 1) % self.num_ranks)
        self.module.train()
        return value if self.is_last else None

    def held(self) -> tuple[State, dict[str, nn.Parameter]]:
        return self.tensors, self.parameters

    def full_state(self) -> State:
        """All stages' parameters and buffers, on every rank: each rank broadcasts its own."""
        state = State()
        for key, like in self.meta_model.state_dict().items():
            value = torch.empty_like(like, device=self.comm.device)
            if self.rank_of[key] == self.index:
                value.copy_(self.whole(self.tensors[key]))
            state[key] = broadcast(self.line, value, root=self.rank_of[key]).cpu()
        return state

    def notes(self) -> dict[str, Any]:
        """Where the model was cut."""
        return {"split_points": list(self.split_points)}

    def crossing(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an activation crosses a cut."""
        return self.half if self.half and dtype == torch.float32 else dtype

    def boundary(self, inputs: Tensor, stage: int) -> Tensor:
        """On the meta device, what enters ``stage`` if ``inputs`` [n, ...] enter the model.

        Of the stage after the last it is the outputs.
        """
        key = inputs.shape, inputs.dtype
        if key not in self._boundaries:
            n, *sample = inputs.shape
            shapes = output_shapes(self.meta_model, tuple(sample), n, inputs.dtype)
            ends = [shapes[end - 1] for _, end in self.bounds]
            dtypes = [*(self.crossing(dtype) for _, dtype in ends[:-1]), ends[-1][1]]
            made = [
                torch.empty(shape, dtype=dtype, device="meta")
                for (shape, _), dtype in zip(ends, dtypes)
            ]
            self._boundaries[key] = [inputs.to("meta"), *made]
        return self._boundaries[key][stage]


def carry_out(comm: Comm, hop: Hop, outgoing: Any, landing: Any) -> None:
    """Send ``outgoing``, receive into ``landing``, or both in a single exchange, as ``hop`` says.

    The tensor of an end that ``hop`` does not have is None.
    """
    if hop.send and hop.recv:
        comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)
    elif hop.send:
        comm.send(outgoing, hop.send.peer)
    elif hop.recv:
        comm.recv(landing, hop.recv.peer)


def tied_parameters(stages: Sequence[nn.Module]) -> list[tuple[nn.Parameter, list[int]]]:
    """The trained parameters that are on several stages, each with the list of its stages.

    Raises:
        ValueError: two stages share a buffer, whose statistics they cannot both keep.
    """
    homes: dict[Tensor, list[int]] = {}
    for index, stage in enumerate(stages):
        for tensor in dict.fromkeys((*stage.parameters(), *stage.buffers())):
            homes.setdefault(tensor, []).append(index)
    tied = [(tensor, places) for tensor, places in homes.items() if len(places) > 1]
    for tensor, places in tied:
        if not isinstance(tensor, nn.Parameter):
            raise ValueError(
                f"a buffer {list(tensor.shape)} belongs to layers on stages {places}: move a "
                "split point, so that one stage has both"
            )
    return [(p, places) for p, places in tied if isinstance(p, nn.Parameter) and p.requires_grad]
