"""One stage of a model: the layers of one rank, and the hops to its neighbours.

Rank s of P holds stage s. Going forward it receives an activation from rank s - 1, runs its
layers, and sends the output to rank s + 1; going backward it receives the gradient of that
output, and sends the gradient of its own input to rank s - 1. Autograd sees none of these hops:
each stage's graph begins with a leaf and ends with a tensor whose gradient is passed to backward.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast, naive_all_reduce
from labkit.comm.comm import Comm, SubComm
from labkit.schedules.pipeline import Action, Hop
from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.strategies.base import MakeOptimizer, State, Strategy
from labkit.workload.layers import HeldBytes, NonLeaf, meta_copy, named_layers, output_shapes


@dataclass(eq=False)
class StagedModel(Strategy):
    """The base of the techniques that cut a model into stages; they add ``step``.

    Every rank is given the same seeded model and keeps its own layers. A parameter that layers on
    several stages share is on each of them; ``update`` sums its gradients first. No gradient
    crosses a cut if nothing before it is trained. With ``amp``, float32 crosses a cut in the half
    dtype.

    Attributes:
        split_points: layers that begin a stage, one fewer than there are ranks.
        line: the Comm of the stages, in their order.
        index, num_stages: s and P.
        module: this stage's layers.
        first_trained: the first stage that trains anything.
        loss_sum: the sum of the losses so far in this step, on the last stage.
        held_bytes: the most bytes that forwards kept for their backward at one time, measured in
            the first step.
    """

    split_points: Sequence[int] = ()
    amp: str | None = field(default=None, kw_only=True)
    optimizes = "layers"

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        # The shapes of all layers, without the other stages' memory.
        self.meta_model = meta_copy(model)
        # Puts together what a mesh cuts.
        self.whole: Callable[[Tensor], Tensor] = Tensor.detach
        self.comm, self.line = comm, self.lay_out(comm, model)
        self.index, self.num_stages = self.line.rank, self.line.world_size
        self.is_first, self.is_last = self.index == 0, self.index == self.num_stages - 1
        layers = named_layers(model)
        points = check_split_points(self.split_points, len(layers), self.num_stages)
        self.split_points, self.bounds = points, stage_bounds(points, len(layers))
        stages = [nn.ModuleList(layer for _, layer in layers[a:b]) for a, b in self.bounds]
        trains = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
        self.first_trained = trains.index(True)
        self.tied = tied_parameters(stages)
        self.counted_elsewhere = {id(p) for p, places in self.tied if self.index != places[0]}
        # By name of a parameter or buffer, its stage.
        self.stage_of = {
            f"{name}.{key}": stage
            for stage, (start, end) in enumerate(self.bounds)
            for name, layer in layers[start:end]
            for key in layer.state_dict()
        }
        self.module = nn.Sequential(*stages[self.index]).to(comm.device).train()
        state = model.state_dict(keep_vars=True)
        self.tensors = {key: state[key] for key, s in self.stage_of.items() if s == self.index}
        names = {id(p): name for name, p in model.named_parameters()}
        mine = [value for value in self.tensors.values() if isinstance(value, nn.Parameter)]
        self.parameters = {names[id(p)]: p for p in mine}
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = make_optimizer(self.trained) if self.trained else None
        self.norm_ranks = range(self.num_stages)
        self.held_bytes, self._measures = 0, True
        self._boundaries: dict[tuple[Any, ...], list[Tensor]] = {}

    def lay_out(self, comm: Comm, model: nn.Module) -> Comm:
        """The ranks that have a stage each; in a mesh some ranks, and it may cut the layers."""
        return comm

    def share(self) -> tuple[int, int]:
        # The whole batch: the first stage needs the inputs, the last one the targets.
        return 0, 1

    def start(
        self, inputs: Tensor, targets: Tensor, batch_size: int, micro_batches: int = 1
    ) -> int:
        """Begin a step: cut the batch into micro-batches, as evenly as possible; returns how many.

        All ranks have the batch: the first stage uses the inputs, the last one the targets.
        """
        count = min(micro_batches, len(targets))
        parts = max(1, count)
        self._inputs, self._targets = inputs.tensor_split(parts), targets.tensor_split(parts)
        self._batch_size = batch_size
        self.loss_sum = targets.new_zeros((), dtype=torch.float64)
        # By micro-batch: what the layers get and return, and the gradient of what they return,
        # then of what they got.
        self._entering, self._leaving, self._gradients = (dict[int, Tensor]() for _ in range(3))
        self._held: dict[int, HeldBytes] = {}
        for parameter in self.trained:
            parameter.grad = None
        return count

    def forward(self, micro_batch: int) -> None:
        """Run the layers; the last stage also computes the loss."""
        measured = contextlib.nullcontext()
        if self._measures:
            measured = self._held[micro_batch] = HeldBytes(self.module)
        with self.comm.span("forward"), measured:
            if self.is_first:
                self._entering[micro_batch] = self._inputs[micro_batch]
            # A leaf, which collects a gradient if one has to be sent back.
            entering = self._entering[micro_batch]
            entering.requires_grad_(self.index > self.first_trained)
            leaving = self.run(entering)
            if self.is_last:
                leaving = self.scaled_loss(leaving, self._targets[micro_batch])
            self._leaving[micro_batch] = leaving
        held_now = sum(held.num_bytes for held in self._held.values())
        self.held_bytes = max(self.held_bytes, held_now)

    def run(self, inputs: Tensor) -> Tensor:
        """The layers' output, in the dtype in which it crosses a cut or enters the loss."""
        with self.autocast(self.comm.device):
            leaving = self.module(NonLeaf.apply(inputs))
        return self.wide(leaving) if self.is_last else leaving.to(self.crossing(leaving.dtype))

    def scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What backward begins with on the last stage; the loss itself is added to the sum."""
        loss = self.loss(outputs, targets)
        self.loss_sum += loss.detach()
        return loss * (self.scaler.scale / self._batch_size)

    def backward(self, micro_batch: int) -> None:
        """Compute the gradient of the stage's input from the gradient of its output."""
        with self.comm.span("backward"):
            # None on the last stage, whose output is the loss.
            gradient = self._gradients.pop(micro_batch, None)
            torch.autograd.backward(self._leaving.pop(micro_batch), gradient)
            self._held.pop(micro_batch, None)
            entered = self._entering.pop(micro_batch)
            if self.index > self.first_trained:
                assert entered.grad is not None, "the layers use their input"
                self._gradients[micro_batch] = entered.grad

    def do(self, step: Action | Hop) -> None:
        """Execute one instruction of ``schedules.pipeline.with_hops``."""
        if isinstance(step, Hop):
            self.hop(step)
        else:
            getattr(self, step.kind)(step.micro_batch)

    def hop(self, hop: Hop) -> None:
        """Send, receive, or both at once; what lands is put where an action will look for it."""
        outgoing = landing = None
        if hop.send and hop.send.kind == "gradient":
            outgoing = self._gradients.pop(hop.send.micro_batch)
        elif hop.send:
            outgoing = self._leaving[hop.send.micro_batch].detach()
        if hop.recv and hop.recv.kind == "gradient":
            landing = torch.empty_like(self._leaving[hop.recv.micro_batch])
            self._gradients[hop.recv.micro_batch] = landing
        elif hop.recv:
            landing = self._landing(self._inputs[hop.recv.micro_batch])
            self._entering[hop.recv.micro_batch] = landing
        carry_out(self.line, hop, outgoing, landing)

    def update(self) -> bool:
        self._measures = False
        for parameter, stages in self.tied:
            if self.index in stages:
                gradient = parameter.grad
                total = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
                parameter.grad = naive_all_reduce(SubComm(self.line, stages), total)
        return super().update()

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode on the last stage, None on the others."""
        value = inputs if self.is_first else self._landing(inputs)
        if not self.is_first:
            self.line.recv(value, self.index - 1)
        self.module.eval()
        value = self.run(value)
        self.module.train()
        if self.is_last:
            return value
        self.line.send(value, self.index + 1)
        return None

    def held(self) -> tuple[State, dict[str, nn.Parameter]]:
        return self.tensors, self.parameters

    def full_state(self) -> State:
        """All stages' parameters and buffers, on every rank: each stage broadcasts its own."""
        state = State()
        for key, like in self.meta_model.state_dict().items():
            value = torch.empty_like(like, device=self.comm.device)
            if self.stage_of[key] == self.index:
                value.copy_(self.whole(self.tensors[key]))
            state[key] = broadcast(self.line, value, root=self.stage_of[key]).cpu()
        return state

    def notes(self) -> dict[str, Any]:
        """Where the model was cut."""
        return {"split_points": list(self.split_points)}

    def crossing(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an activation crosses a cut."""
        return self.half if self.half and dtype == torch.float32 else dtype

    def boundary(self, inputs: Tensor, stage: int) -> Tensor:
        """On the meta device, what enters ``stage`` if ``inputs`` [n, ...] enter the model.

        Of stage P it is the outputs.
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

    def _landing(self, inputs: Tensor) -> Tensor:
        return torch.empty_like(self.boundary(inputs, self.index), device=self.comm.device)


def carry_out(comm: Comm, hop: Hop, outgoing: Any, landing: Any) -> None:
    """Carry out one hop: send, receive, or both in a single exchange.

    Args:
        comm: this rank's Comm.
        hop: what is sent and received, and from whom; one of the two may be None.
        outgoing: the tensor to send, None if nothing is sent.
        landing: the memory to receive into, None if nothing is received.
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
