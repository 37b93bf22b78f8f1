"""One stage of a model: the layers of one rank, and the hops to its neighbours.

Rank s of P holds stage s. Going forward it receives an activation from rank s - 1, runs its
layers, and sends what comes out to rank s + 1; going backward the gradient of that activation
comes back, and the gradient of its own input goes on to rank s - 1. Autograd sees none of the
hops: each stage's graph begins with a leaf and ends with a tensor that is given its gradient.

Symbols: P ranks and stages, n samples of a micro-batch, m its number.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import all_gather, broadcast
from labkit.comm.comm import Comm
from labkit.schedules.pipeline import Action, Hop, Message
from labkit.schedules.stages import as_split_points, stage_bounds
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.units import format_count
from labkit.workload.activations import HeldBytes, NonLeaf
from labkit.workload.layers import meta_copy, named_layers, output_shapes


class Stage:
    """This rank's layers, run on one micro-batch after the other.

    Every rank is given the same seeded model and keeps its slice. A parameter of layers on several
    stages (tied) lives on each of them: ``update`` sums their gradients first, so that all make
    the same step. Where nothing before a cut is trained, no gradient crosses it.

    Layers that draw random numbers (dropout) do not equal one device: each rank draws its own.

    Args:
        comm: this rank's Comm; its world size is the number of stages.
        model: a chain of layers, see ``layers.layers_of``.
        split_points: P - 1 of them, see ``schedules.check_split_points``.
        make_optimizer: of a list of parameters; not called by a stage that trains none.

    Attributes:
        module: this stage's layers.
        first_trained: the first stage that trains anything.
        held_bytes: the most that forwards had kept for their backward at one time, in the first
            step.

    Raises:
        ValueError: no chain of layers, impossible split points, nothing to train, or a buffer
            (BatchNorm's averages) of layers on several stages.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        split_points: Sequence[int],
        make_optimizer: MakeOptimizer,
    ):
        self.comm = comm
        self.index, self.count = comm.rank, comm.world_size
        names, layers = zip(*named_layers(model))
        self.bounds = stage_bounds(split_points, len(layers))
        if len(self.bounds) != self.count:
            raise ValueError(
                f"{format_count(len(self.bounds), 'stage')} for "
                f"{format_count(self.count, 'rank')}: each rank holds one stage"
            )
        stages = [nn.ModuleList(layers[start:end]) for start, end in self.bounds]
        self.first_trained = _first_trained(stages)
        self.tied = _tied(stages)
        # The shapes of all layers; the other stages' parameters are let go.
        self.names, self.ghost = names, meta_copy(model)
        self.module = nn.Sequential(*stages[self.index]).to(comm.device).train()
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(trained) if trained else None
        self.held_bytes: int | None = None
        self._shapes: dict[tuple, list] = {}

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def start(
        self, inputs: Tensor, targets: Tensor, batch_size: int, micro_batches: int = 1
    ) -> None:
        """Begin a step: cut the batch into micro-batches, as evenly as it goes.

        Args:
            inputs, targets: [batch_size, ...] and [batch_size], on every rank; the first stage
                uses the inputs, the last one the targets, and all know the sizes.
            batch_size: what the sum of the losses is divided by.
            micro_batches: as many, or as there are samples if that is less.
        """
        count = min(micro_batches, len(targets))
        self.micro_batches = count
        self._inputs, self._targets = inputs.tensor_split(count), targets.tensor_split(count)
        self._divisor = batch_size
        self.loss = targets.new_zeros((), dtype=torch.float64)
        self._entering: dict[int, Tensor] = {}
        self._leaving: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._held: dict[int, HeldBytes] = {}
        self._measures, self.held_bytes = self.held_bytes is None, self.held_bytes or 0
        self.module.zero_grad()

    def forward(self, micro_batch: int) -> None:
        """Run the layers; the last stage also computes the loss."""
        with self.comm.span("forward"):
            entering = self._enter(micro_batch)
            if self._measures:
                with HeldBytes(self.module) as self._held[micro_batch]:
                    self._leaving[micro_batch] = self._run(entering, micro_batch)
                held_now = sum(held.num_bytes for held in self._held.values())
                self.held_bytes = max(self.held_bytes, held_now)
            else:
                self._leaving[micro_batch] = self._run(entering, micro_batch)

    def backward(self, micro_batch: int) -> None:
        """From the gradient of what left the stage to the gradient of what had entered it."""
        with self.comm.span("backward"):
            # The last stage's output is the loss.
            gradient = self._gradients.pop(micro_batch, None)
            leaving = self._leaving.pop(micro_batch)
            # Layers that detach, or hand on whole numbers, end the way back: zeros go on.
            if leaving.requires_grad or self.is_last:
                torch.autograd.backward(leaving, gradient)
            self._held.pop(micro_batch, None)
            entered = self._entering.pop(micro_batch)
            if self.index > self.first_trained:
                missing = entered.grad is None
                self._gradients[micro_batch] = (
                    torch.zeros_like(entered) if missing else entered.grad
                )

    def do(self, step: Action | Hop) -> None:
        """Carry out one step of ``schedules.with_hops``."""
        if isinstance(step, Hop):
            self.hop(step)
        else:
            getattr(self, step.kind)(step.micro_batch)

    def hop(self, hop: Hop) -> None:
        """Send, receive, or both at once."""
        if hop.send and hop.recv:
            landing = self._landing(hop.recv)
            self.comm.exchange(self._outgoing(hop.send), hop.send.peer, landing, hop.recv.peer)
        elif hop.send:
            self.comm.send(self._outgoing(hop.send), hop.send.peer)
        elif hop.recv:
            self.comm.recv(self._landing(hop.recv), hop.recv.peer)

    def update(self) -> None:
        """Sum the gradients of tied parameters over their stages, and make one step."""
        for parameter, stages in self.tied:
            if self.index in stages:
                parameter.grad = self._sum_over(stages, parameter)
        with self.comm.span("update"):
            if self.optimizer:
                self.optimizer.step()

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode on the last stage, None on the others.

        Args:
            inputs: [n, ...] on every rank; the first stage uses them, all know their number.
        """
        self.module.eval()
        value = inputs
        if not self.is_first:
            value = self.comm.recv(self._empty(inputs, self.bounds[self.index][0]), self.index - 1)
        value = self.module(value)
        self.module.train()
        if self.is_last:
            return value
        self.comm.send(value, self.index + 1)
        return None

    def full_state(self) -> dict[str, Tensor]:
        """All stages' parameters and buffers, on every rank: each stage broadcasts its own."""
        state, ghosts = {}, [layer for _, layer in named_layers(self.ghost)]
        for stage, (start, end) in enumerate(self.bounds):
            for index in range(start, end):
                mine = self.module[index - start].state_dict() if stage == self.index else {}
                for key, shape in ghosts[index].state_dict().items():
                    value = torch.empty_like(shape, device=self.comm.device)
                    if stage == self.index:
                        value.copy_(mine[key])
                    broadcast(self.comm, value, root=stage)
                    state[f"{self.names[index]}.{key}"] = value.cpu()
        return state

    def held_by_stage(self) -> list[int]:
        """``held_bytes`` of every stage, on every rank."""
        mine = torch.tensor([self.held_bytes or 0], device=self.comm.device)
        return torch.cat(all_gather(self.comm, mine)).tolist()

    def _enter(self, micro_batch: int) -> Tensor:
        """What the layers start from: a leaf, which collects a gradient if one has to go back."""
        if self.is_first:
            self._entering[micro_batch] = self._inputs[micro_batch]
        entering = self._entering[micro_batch]
        differentiable = entering.is_floating_point() or entering.is_complex()
        return entering.requires_grad_(differentiable and self.index > self.first_trained)

    def _run(self, entering: Tensor, micro_batch: int) -> Tensor:
        leaving = self.module(NonLeaf.apply(entering))
        if not self.is_last:
            return leaving
        targets = self._targets[micro_batch]
        loss = functional.cross_entropy(leaving, targets, reduction="sum")
        self.loss += loss.detach()
        return loss / self._divisor

    def _outgoing(self, message: Message) -> Tensor:
        if message.kind == "gradient":
            return self._gradients.pop(message.micro_batch)
        leaving = self._leaving[message.micro_batch]
        if self.index < self.first_trained:
            del self._leaving[message.micro_batch], self._entering[message.micro_batch]
        return leaving.detach()

    def _landing(self, message: Message) -> Tensor:
        """Memory to receive into, where forward or backward will look for it."""
        like, start = self._inputs[message.micro_batch], self.bounds[self.index][0]
        if message.kind == "activation":
            return self._entering.setdefault(message.micro_batch, self._empty(like, start))
        gradient = torch.empty_like(self._leaving[message.micro_batch])
        return self._gradients.setdefault(message.micro_batch, gradient)

    def _empty(self, inputs: Tensor, layer: int) -> Tensor:
        """[n, ...]: what enters ``layer`` when ``inputs`` [n, ...] enter the model."""
        key = inputs.shape, inputs.dtype
        if key not in self._shapes:
            n, *sample = inputs.shape
            self._shapes[key] = output_shapes(self.ghost, tuple(sample), n, inputs.dtype)
        shape, dtype = self._shapes[key][layer - 1]
        return torch.empty(shape, dtype=dtype, device=self.comm.device)

    def _sum_over(self, stages: list[int], parameter: nn.Parameter) -> Tensor:
        """The gradient of a tied parameter: added up on its first stage, and sent to the others.

        Not by the ring: other stages have no part in it, and equal bits are wanted.
        """
        missing = parameter.grad is None
        total = torch.zeros_like(parameter) if missing else parameter.grad.contiguous()
        first, *others = stages
        if self.index != first:
            self.comm.send(total, first)
            return self.comm.recv(total, first)
        for other in others:
            self.comm.recv_add(total, other)
        for other in others:
            self.comm.send(total, other)
        return total


def _first_trained(stages: list[nn.ModuleList]) -> int:
    for index, stage in enumerate(stages):
        if any(p.requires_grad for p in stage.parameters()):
            return index
    raise ValueError("no parameter of this model requires a gradient: there is none to train")


def _tied(stages: list[nn.ModuleList]) -> list[tuple[nn.Parameter, list[int]]]:
    """Trained parameters that are on several stages, and on which.

    Raises:
        ValueError: a buffer is on several stages: each would change its own copy.
    """
    homes: dict[int, tuple[Tensor, list[int]]] = {}
    for index, stage in enumerate(stages):
        for tensor in {id(t): t for t in (*stage.parameters(), *stage.buffers())}.values():
            homes.setdefault(id(tensor), (tensor, []))[1].append(index)
    shared = [(tensor, places) for tensor, places in homes.values() if len(places) > 1]
    for tensor, places in shared:
        if not isinstance(tensor, nn.Parameter):
            raise ValueError(
                f"a buffer {list(tensor.shape)} belongs to layers on stages {places}: a layer "
                "with statistics cannot be on two stages; move a split point"
            )
    return [(tensor, places) for tensor, places in shared if tensor.requires_grad]


class StagedModel(Strategy):
    """What the techniques that cut a model have in common, as a ``train.Strategy`` without step.

    Args:
        split_points: layers that begin a stage, one less than there are ranks.

    Raises:
        ValueError: split points that are no sequence.
    """

    def __init__(self, split_points: Sequence[int] = ()):
        self.split_points = as_split_points(split_points)

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError unless there is a rank for each stage."""
        if len(self.split_points) + 1 != world_size:
            raise ValueError(
                f"{format_count(len(self.split_points), 'split point')} for "
                f"{format_count(world_size, 'rank')}, each of which holds one stage: give "
                f"{world_size - 1}"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.stage = Stage(comm, model, self.split_points, make_optimizer)

    def share(self) -> tuple[int, int]:
        # The whole batch: the first stage needs the inputs, the last one the targets.
        return 0, 1

    def predict(self, inputs: Tensor) -> Tensor | None:
        return self.stage.predict(inputs)

    def full_state(self) -> dict[str, Tensor]:
        return self.stage.full_state()

    def notes(self) -> dict[str, Any]:
        """Where the model was cut, and by stage the activations that were held at most."""
        held = self.stage.held_by_stage()
        return {"split_points": list(self.split_points), "held_bytes": held}
