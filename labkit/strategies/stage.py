"""One stage of a model: the layers of one rank, and the hops to its neighbours.

Rank s of P holds stage s. Going forward it receives an activation from rank s - 1, runs its
layers, and sends the output to rank s + 1; going backward it receives the gradient of that
output, and sends the gradient of its own input to rank s - 1. Autograd sees none of these hops:
each stage's graph begins with a leaf and ends with a tensor whose gradient is passed to backward.

The order of this work is not decided here: a stage executes the instructions of
``schedules.pipeline``.

Symbols: P ranks and stages, n samples in a micro-batch.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labkit.collectives import all_gather, broadcast
from labkit.comm.comm import Comm
from labkit.schedules.pipeline import Action, Hop, Message
from labkit.schedules.split_points import as_split_points, check_split_points, stage_bounds
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.kept import Kept
from labkit.strategies.mixed_precision import MixedPrecision
from labkit.strategies.update import Parts, Update, sum_over
from labkit.units import format_count
from labkit.workload.activations import HeldBytes, NonLeaf
from labkit.workload.chain import named_layers, state_key
from labkit.workload.layers import output_shapes
from labkit.workload.losses import Loss, sum_cross_entropy
from labkit.workload.meta import meta_copy

# Those that an activation may have; a stage tells the next one a place in this list.
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


class Stage:
    """This rank's layers, and the micro-batches that are under way in them.

    Every rank is given the same seeded model and keeps its own layers. A tied parameter that
    belongs to layers on several stages is kept by each of these stages: ``update`` sums its
    gradients first, so that they all make the same step. No gradient crosses a cut if nothing
    before the cut is trained.

    Args:
        comm: this rank's Comm; its world size is the number of stages.
        model: a chain of layers, see ``workload.chain.layers_of``.
        split_points: P - 1 of them, see ``schedules.split_points.check_split_points``.
        make_optimizer: makes an optimizer of a list of parameters; a stage that trains none does
            not call it.
        loss: (outputs, targets) -> the sum over the samples.
        amp: see ``LocalGradients``. With it, what crosses a cut has the dtype that it has on one
            device, which depends on the layers: before its first activation a stage tells the
            next one this dtype, in a message of one byte.
        clip_norm: see ``Update``.

    Attributes:
        index, count: s and P.
        module: this stage's layers.
        first_trained: the first stage that trains anything.
        loss: the sum of the losses so far in this step, on the last stage.
        held_bytes: the most bytes that forwards kept for their backward at one time, measured in
            the first step.

    Raises:
        ValueError: the model is not a chain of layers, impossible split points, nothing to train,
            or a buffer (BatchNorm's averages) that layers on several stages share.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        split_points: Sequence[int],
        make_optimizer: MakeOptimizer,
        loss: Loss = sum_cross_entropy,
        amp: str | None = None,
        clip_norm: float | None = None,
    ):
        self.comm, self.loss_of, self.precision = comm, loss, MixedPrecision(amp)
        self.index, self.count = comm.rank, comm.world_size
        self.is_first, self.is_last = self.index == 0, self.index == self.count - 1
        names, layers = zip(*named_layers(model))
        name_of = {id(p): name for name, p in model.named_parameters()}
        points = check_split_points(split_points, len(layers), self.count)
        self.bounds = stage_bounds(points, len(layers))
        stages = [nn.ModuleList(layers[start:end]) for start, end in self.bounds]
        self.first_trained = _first_trained(stages)
        self.tied = _tied(stages)
        # The shapes of all layers, without the other stages' memory.
        self.names, self.meta_model = names, meta_copy(model)
        self.outside = _outside(model, names, layers)
        self.module = nn.Sequential(*stages[self.index])
        used = [name_of[id(p)] for p in self.module.parameters()]
        # Moving a module may replace its parameters, but keeps their order.
        self.module.to(comm.device).train()
        self.parameters = dict(zip(used, self.module.parameters()))
        # Without gradients, all stages make the same updates of them.
        unused = {id(v): v for v in self.outside.values() if isinstance(v, nn.Parameter)}
        for parameter in unused.values():
            parameter.data = parameter.data.to(comm.device)
        self.parameters |= {name_of[id(p)]: p for p in unused.values()}
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = make_optimizer(self.trained) if self.trained else None
        # A tied parameter counts on its first stage, and one that no layer uses has no gradient.
        elsewhere = {name_of[id(p)] for p, on in self.tied if self.index != on[0]}
        parts, scaler = self._parts(model, set(used) - elsewhere), self.precision.scaler
        settings = {"clip_norm": clip_norm, "scaler": scaler, "parts": parts}
        self._update = Update(self.optimizer, self.trained, **settings)
        self.held_bytes = 0
        self._measures = True
        self._shapes: dict[tuple[Any, ...], list[Any]] = {}
        # With amp, the dtypes of what comes in and what goes out, as soon as they are known.
        self._dtypes: dict[str, torch.dtype] = {}

    def _parts(self, model: nn.Module, counted: set[str]) -> Parts | None:
        """Where the norms of this stage's gradients are among those of the whole model.

        ``counted`` has the names of the parameters whose norm this stage fills in.
        """
        if self.count == 1:
            return None
        trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
        place_of = {name: place for place, name in enumerate(trained) if name in counted}
        mine = [name for name, p in self.parameters.items() if p.requires_grad]
        places = [place_of.get(name) for name in mine]
        dtype = functools.reduce(torch.promote_types, trained.values())
        return Parts(self.comm, range(self.count), places, len(trained), dtype)

    def start(
        self, inputs: Tensor, targets: Tensor, batch_size: int, micro_batches: int = 1
    ) -> None:
        """Begin a step: cut the batch into micro-batches, as evenly as possible.

        Args:
            inputs, targets: [batch_size, ...] and [batch_size], on every rank; the first stage
                uses the inputs, the last one the targets, all others only the sizes.
            batch_size: the sum of the losses is divided by it.
            micro_batches: the number of micro-batches; fewer if there are fewer samples.
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
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def forward(self, micro_batch: int) -> None:
        """Run the layers; the last stage also computes the loss."""
        with self.comm.span("forward"), self._measured(micro_batch):
            self._leaving[micro_batch] = self._run(self._enter(micro_batch), micro_batch)

    def backward(self, micro_batch: int) -> None:
        """Compute the gradient of the stage's input from the gradient of its output."""
        with self.comm.span("backward"):
            # None on the last stage, whose output is the loss.
            gradient = self._gradients.pop(micro_batch, None)
            leaving = self._leaving.pop(micro_batch)
            # No gradient passes through layers that detach or output integers: zeros are sent.
            if leaving.requires_grad or self.is_last:
                torch.autograd.backward(leaving, gradient)
            self._held.pop(micro_batch, None)
            entered = self._entering.pop(micro_batch)
            if self.index > self.first_trained:
                found = entered.grad
                self._gradients[micro_batch] = (
                    torch.zeros_like(entered) if found is None else found
                )

    def do(self, step: Action | Hop) -> None:
        """Execute one instruction of ``schedules.pipeline.with_hops``."""
        if isinstance(step, Hop):
            self.hop(step)
        elif step.kind == "forward":
            self.forward(step.micro_batch)
        else:
            self.backward(step.micro_batch)

    def hop(self, hop: Hop) -> None:
        """Send, receive, or both at once; what lands is put where an action will look for it."""
        self._agree_on_dtypes(hop)
        outgoing = self._outgoing(hop.send) if hop.send else None
        landing = self._landing(hop.recv) if hop.recv else None
        carry_out(self.comm, hop, outgoing, landing)

    def update(self) -> None:
        """Sum the gradients of tied parameters over their stages, then make one step."""
        self._measures = False
        for parameter, stages in self.tied:
            if self.index in stages:
                gradient = parameter.grad
                total = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
                parameter.grad = sum_over(self.comm, stages, total)
        with self.comm.span("update"):
            self._update()

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode on the last stage, None on the others.

        Args:
            inputs: [n, ...] on every rank; the first stage uses them, all others only their size.
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
        state, shapes = {}, [layer for _, layer in named_layers(self.meta_model)]
        for stage, (start, end) in enumerate(self.bounds):
            for index in range(start, end):
                mine = self.module[index - start].state_dict() if stage == self.index else {}
                for key, shape in shapes[index].state_dict().items():
                    value = torch.empty_like(shape, device=self.comm.device)
                    if stage == self.index:
                        value.copy_(mine[key])
                    broadcast(self.comm, value, root=stage)
                    state[state_key(self.names[index], key)] = value.cpu()
        # In the model's own order, and with what no layer uses.
        state |= {key: value.detach().cpu().clone() for key, value in self.outside.items()}
        return {key: state[key] for key in self.meta_model.state_dict()}

    def kept(self) -> Kept:
        """This stage's part of the model, and what no layer uses, which is equal on all stages."""
        # Several layers may have an empty name: their parameters have their full names.
        named = list(zip(self.names[slice(*self.bounds[self.index])], self.module))
        state = {
            state_key(name, key): value.detach()
            for name, layer in named
            for key, value in layer.state_dict().items()
        }
        outside = {key: value.detach() for key, value in self.outside.items()}
        kept = Kept(state | outside, self.parameters, self.optimizer)
        kept.buffers = {
            state_key(name, key): buffer
            for name, layer in named
            for key, buffer in layer.named_buffers()
        }
        return kept

    @contextmanager
    def _measured(self, micro_batch: int) -> Iterator[None]:
        """Count, in the first step, the bytes that a forward keeps for its backward."""
        if not self._measures:
            yield
            return
        with HeldBytes(self.module) as self._held[micro_batch]:
            yield
        held_now = sum(held.num_bytes for held in self._held.values())
        self.held_bytes = max(self.held_bytes, held_now)

    def _enter(self, micro_batch: int) -> Tensor:
        """The layers' input: a leaf, which collects a gradient if one has to be sent back."""
        if self.is_first:
            self._entering[micro_batch] = self._inputs[micro_batch]
        entering = self._entering[micro_batch]
        differentiable = entering.is_floating_point() or entering.is_complex()
        return entering.requires_grad_(differentiable and self.index > self.first_trained)

    def _run(self, entering: Tensor, micro_batch: int) -> Tensor:
        with self.precision.autocast(self.comm.device):
            leaving = self.module(NonLeaf.apply(entering))
        if not self.is_last:
            return leaving
        targets = self._targets[micro_batch]
        loss = self.loss_of(self.precision.wide(leaving), targets)
        self.loss += loss.detach()
        return self.precision.scaler.scale(loss / self._divisor)

    def _agree_on_dtypes(self, hop: Hop) -> None:
        """With amp, tell the next stage the dtype of the activations before the first one."""
        if self.precision.half is None:
            return
        for message in filter(None, (hop.send, hop.recv)):
            way = "out" if message is hop.send else "in"
            if message.kind != "activation" or way in self._dtypes:
                continue
            code = torch.zeros(1, dtype=torch.uint8, device=self.comm.device)
            if way == "out":
                dtype = self._leaving[message.micro_batch].dtype
                self.comm.send(code.fill_(_DTYPES.index(dtype)), message.peer)
            else:
                dtype = _DTYPES[int(self.comm.recv(code, message.peer))]
            self._dtypes[way] = dtype

    def _outgoing(self, message: Message) -> Tensor:
        if message.kind == "gradient":
            return self._gradients.pop(message.micro_batch)
        leaving = self._leaving[message.micro_batch]
        if self.index < self.first_trained:
            del self._leaving[message.micro_batch], self._entering[message.micro_batch]
        return leaving.detach()

    def _landing(self, message: Message) -> Tensor:
        """Memory to receive into, where forward or backward will find it."""
        like, start = self._inputs[message.micro_batch], self.bounds[self.index][0]
        if message.kind == "activation":
            empty = self._empty(like, start, self._dtypes.get("in"))
            return self._entering.setdefault(message.micro_batch, empty)
        gradient = torch.empty_like(self._leaving[message.micro_batch])
        return self._gradients.setdefault(message.micro_batch, gradient)

    def _empty(self, inputs: Tensor, layer: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for the input of ``layer``, [n, ...], if ``inputs`` [n, ...] enter the model.

        Its dtype is that of a forward without amp, if no other is given.
        """
        key = inputs.shape, inputs.dtype
        if key not in self._shapes:
            n, *sample = inputs.shape
            self._shapes[key] = output_shapes(self.meta_model, tuple(sample), n, inputs.dtype)
        shape, plain = self._shapes[key][layer - 1]
        return torch.empty(shape, dtype=dtype or plain, device=self.comm.device)


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


def _outside(
    model: nn.Module, names: Sequence[str], layers: Sequence[nn.Module]
) -> dict[str, Tensor]:
    """The parameters and buffers that belong to no layer: forward uses none of them."""
    inside = {
        state_key(name, key) for name, layer in zip(names, layers) for key in layer.state_dict()
    }
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if key not in inside}


def _first_trained(stages: list[nn.ModuleList]) -> int:
    for index, stage in enumerate(stages):
        if any(p.requires_grad for p in stage.parameters()):
            return index
    raise ValueError("no parameter of this model requires a gradient: there is nothing to train")


def _tied(stages: list[nn.ModuleList]) -> list[tuple[nn.Parameter, list[int]]]:
    """Trained parameters that are on several stages, each with the list of its stages.

    Raises:
        ValueError: a buffer is on several stages, each of which would change its own copy.
    """
    tied = []
    for tensor, places in on_several(stages):
        if not isinstance(tensor, nn.Parameter):
            raise ValueError(
                f"a buffer {list(tensor.shape)} belongs to layers on stages {places}: a layer "
                "with statistics cannot be on two stages; move a split point"
            )
        if tensor.requires_grad:
            tied.append((tensor, places))
    return tied


def on_several(stages: Sequence[nn.Module]) -> Iterator[tuple[Tensor, list[int]]]:
    """Parameters and buffers that are on several stages, each with the list of its stages."""
    homes: dict[int, tuple[Tensor, list[int]]] = {}
    for index, stage in enumerate(stages):
        for tensor in {id(t): t for t in (*stage.parameters(), *stage.buffers())}.values():
            homes.setdefault(id(tensor), (tensor, []))[1].append(index)
    return (home for home in homes.values() if len(home[1]) > 1)


class StagedModel(Strategy):
    """The base of the techniques that cut a model into stages; they add ``step``.

    Args:
        split_points: layers that begin a stage, one fewer than there are ranks.
        amp: see ``Stage``.

    Raises:
        ValueError: split points that are not a sequence.
    """

    optimizes = "layers"
    instead: ClassVar = {
        "sync_batch_norm": "each layer is on one rank, and sees the whole (micro-)batch already; "
        "leave it out"
    }

    def __init__(self, split_points: Sequence[int] = (), amp: str | None = None):
        self.split_points, self.amp = as_split_points(split_points), amp

    def check_ranks(self, world_size: int) -> None:
        if len(self.split_points) + 1 != world_size:
            raise ValueError(
                f"{format_count(len(self.split_points), 'split point')} for "
                f"{format_count(world_size, 'rank')}, each of which holds one stage: give "
                f"{world_size - 1}"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm = comm
        settings = {"loss": self.loss, "amp": self.amp, "clip_norm": self.clip_norm}
        self.stage = Stage(comm, model, self.split_points, make_optimizer, **settings)
        self.scaler = self.stage.precision.scaler
        self.optimizer = self.stage.optimizer

    def share(self) -> tuple[int, int]:
        # The whole batch: the first stage needs the inputs, the last one the targets.
        return 0, 1

    def predict(self, inputs: Tensor) -> Tensor | None:
        return self.stage.predict(inputs)

    def full_state(self) -> dict[str, Tensor]:
        return self.stage.full_state()

    def kept(self) -> Kept:
        return self.stage.kept()

    def notes(self) -> dict[str, Any]:
        """The split points, and by stage the most bytes of activations held at one time."""
        held = torch.tensor([self.stage.held_bytes], device=self.comm.device)
        by_stage = torch.cat(all_gather(self.comm, held)).tolist()
        return {"split_points": list(self.split_points), "held_bytes": by_stage}


# Of the techniques that cut a batch into micro-batches anyway.
PIPELINED_INSTEAD = StagedModel.instead | {
    "accumulate": "a pipeline adds up the gradients of its micro-batches already: choose their "
    "number with micro_batches"
}
