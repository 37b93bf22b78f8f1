"""Sharded data parallelism (ZeRO): ranks divide among them what data parallelism holds P times.

The trained parameters of each layer form a **flat** tensor, cut into P chunks: one per rank, its
**shard**. Each rank makes the update of its shard alone, with its part of the optimizer's state.

**Stage 1** divides the optimizer's state. 1. Forward and backward, as in DDP; of the gradients
that are complete, share_reduce sums each rank's chunk, while the rest of backward runs. 2. Each
rank updates its shard. 3. share_only gives the new values to all.

**Stage 2** divides the gradients, too: a layer's exist as a whole from when backward enters the
layer until their sums are added to the shards' gradients.

**Stage 3** divides the parameters, too. A layer's are gathered (share_only) before its forward and
again before its backward, while the layer before is computing, and freed after; step 3 is gone.

Bytes sent per rank and step: 2, 2 and 3 (P - 1)/P x S. In memory, S bytes of each kind become S/P,
and what is under way: ``costs.sharded_memory``. In which order: ``schedules.sharding``.

Symbols: P ranks, N elements of a flat, S bytes of the trained parameters. Sources: Rajbhandari et
al., "ZeRO: memory optimizations toward training trillion parameter models" (2020), sections 5 and
7; Zhao et al., "PyTorch FSDP" (2023), section 3.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives.ring import all_gather, share_only, share_reduce, split_chunks
from labkit.comm.comm import Comm
from labkit.comm.work import Work, work_queue_of
from labkit.schedules.bucket_assignment import MIB
from labkit.schedules.ring import owned_chunk
from labkit.schedules.sharding import Instruction, sharded_pass
from labkit.strategies.base import MakeOptimizer, State, as_tensor, of_kind
from labkit.strategies.on_shares import OnShares
from labkit.units import check_integer
from labkit.workload.layers import HeldBytes, layers_of
from labkit.workload.losses import Loss


class Flat:
    """Parameters that are divided together; their values lie in ``full`` [N], cut into ``chunks``.

    ``shard`` is this rank's chunk, which its optimizer changes: in stage 3 a copy, as ``full`` has
    memory between ``gather`` and ``free`` alone; a new flat is whole, too. The
    parameters may be on the host: this flat alone moves to the device. Their gradients are views
    of ``gradient`` [N]: in stage 1 always, else between ``begin`` and ``finish``; ``total`` is the
    shard's. ``flying`` is what is under way: gathered ahead, or reduced. The methods from
    ``gather`` to ``finish`` are those of ``schedules.sharding``.
    """

    def __init__(self, comm: Comm, stage: int, parameters: list[nn.Parameter]):
        self.comm, self.stage, self.parameters = comm, stage, parameters
        self.sizes = [parameter.numel() for parameter in parameters]
        values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.full = values.to(comm.device)
        self.num_bytes, self.trained = self.full.nbytes, parameters[0].requires_grad
        for parameter, piece in zip(parameters, self.pieces(self.full)):
            parameter.data = piece
        self.mine = owned_chunk(comm.rank, comm.world_size)
        self.chunks = split_chunks(self.full, comm.world_size)
        own = self.chunks[self.mine]
        self.shard = nn.Parameter(own.clone() if stage == 3 else own, self.trained)
        self.work: Work | None = None
        self.flying: Tensor | None = None
        self.gradient: Tensor | None = None
        self.total = torch.zeros_like(own)
        if self.trained:
            if stage == 1:
                self.total = split_chunks(self.begin(), comm.world_size)[self.mine]
            self.shard.grad = self.total

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor [N] in the shapes of the parameters."""
        return [one.view_as(p) for one, p in zip(flat.split(self.sizes), self.parameters)]

    def gather(self) -> None:
        self.full.untyped_storage().resize_(self.num_bytes)

        def operation(comm: Comm) -> None:
            self.chunks[self.mine].copy_(self.shard)
            share_only(comm, self.chunks)

        self.flying = self.full
        self.work = work_queue_of(self.comm).add("share_only", operation, [self.full], [])

    def wait(self) -> None:
        if self.work:
            with self.comm.span("wait"):
                self.work.wait()
        self.work = self.flying = None

    def free(self) -> None:
        # What autograd keeps of it are views: they show the values of the next gather.
        self.full.untyped_storage().resize_(0)

    def begin(self) -> Tensor:
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.full)
            for parameter, piece in zip(self.parameters, self.pieces(self.gradient)):
                parameter.grad = piece
        return self.gradient

    def reduce(self) -> None:
        chunks = split_chunks(gradient := self.begin(), self.comm.world_size)

        def operation(comm: Comm) -> None:
            share_reduce(comm, chunks)
            if self.stage > 1:
                self.total += chunks[self.mine]

        self.work = work_queue_of(self.comm).add("share_reduce", operation, [gradient], [])
        if self.stage > 1:
            self.flying, self.gradient = gradient, None
            for parameter in self.parameters:
                parameter.grad = None

    finish = wait

    def clear(self) -> None:
        """Drop what a pass has left that an exception has ended."""
        self.wait()
        self.total.zero_()
        if self.stage > 1:
            self.gradient = None
            for parameter in self.parameters:
                parameter.grad = None
        if self.stage == 3:
            self.free()

    def whole(self, part: Tensor) -> list[Tensor]:
        """From the ranks' parts, like their shards, values by parameter; a collective call."""
        chunks = split_chunks(flat := part.new_empty(sum(self.sizes)), self.comm.world_size)
        chunks[self.mine].copy_(part.detach())
        share_only(self.comm, chunks)
        return self.pieces(flat)

    def part(self, values: list[Tensor]) -> Tensor:
        """The opposite: of values by parameter, this rank's part."""
        flat = torch.cat([value.flatten() for value in values])
        return split_chunks(flat, self.comm.world_size)[self.mine]


def divide(
    model: nn.Module, stage: int
) -> tuple[list[list[nn.Module]], list[list[nn.Parameter]], list[list[int]]]:
    """The layers of each unit, the parameters of each flat, and by unit the flats that it uses.

    The parameters of a flat have one dtype, and are all trained or all frozen.
    """
    units: list[list[nn.Module]] = []
    # Every message has a fixed cost. In stages 2 and 3 large units would take memory.
    least, held = MIB if stage == 1 else 0, 0
    for layer in layers_of(model):
        size = sum(parameter.nbytes for parameter in layer.parameters())
        if not units or (size and held > least):
            units.append([])
            held = 0
        units[-1].append(layer)
        held += size
    flats: list[list[nn.Parameter]] = []
    homes: dict[nn.Parameter, int] = {}
    uses = []
    for layers in units:
        parameters = dict.fromkeys(p for layer in layers for p in layer.parameters())
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in (p for p in parameters if p not in homes):
            alike.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        for some in alike.values():
            homes |= dict.fromkeys(some, len(flats))
            flats.append(some)
        uses.append(list(dict.fromkeys(homes[parameter] for parameter in parameters)))
    return units, flats, uses


def total_bytes(ledger: Mapping[str, int]) -> int:
    return sum(ledger.values())


@dataclass(eq=False)
class Sharded(OnShares):
    """Synchronous data parallelism whose ranks hold a part of what they update.

    A unit is a layer with parameters, and those without that follow; in stage 1 layers of 1 MiB. A
    parameter belongs to the first unit that uses it; for another one (a tied parameter) stage 3
    gathers it once more. The model is a chain of layers, see ``workload.layers``.

    Args:
        stage: what is divided: 1 the optimizer's state, 2 also gradients, 3 also parameters.
        accumulate: as elsewhere; stages 2 and 3 sum the gradients of each micro-batch.

    Attributes:
        flats: by dtype, and whether they are trained, the parameters that belong to a unit.
        uses: by unit, the numbers of the flats that it uses; ``sums`` are those of trained ones.
        most_at_setup: the ``held_now`` with the most bytes while the flats are made.
        most_held: of two steps, the ``held_now`` with the most bytes when backward enters a unit.
        activation_bytes: what the first forward kept for its backward.
    """

    stage: int = 3
    sync_batch_norm: bool = False
    optimizes = "elements"
    predicts_together = runs_empty = True

    def __post_init__(self) -> None:
        check_integer("stage", self.stage, least=1, most=3)

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        layers_of(model)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        # The device may not hold the whole model: one flat after the other is cut and moved there.
        self.take(comm, model)
        for buffer in model.buffers():
            buffer.data = buffer.to(comm.device)
        self.units, flat_parameters, self.uses = divide(model, self.stage)
        self.flats: list[Flat] = []
        self.most_at_setup = self.held_now()
        for parameters in flat_parameters:
            flat = Flat(comm, self.stage, parameters)
            self.flats.append(flat)
            self.most_at_setup = max(self.most_at_setup, self.held_now(), key=total_bytes)
            if self.stage == 3:
                flat.free()
        self.names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(parameter, []).append(name)
        self.sums = [number for number, flat in enumerate(self.flats) if flat.trained]
        self.trained = [self.flats[number].shard for number in self.sums]
        self.optimizer = make_optimizer(self.trained)
        self.norm_ranks = range(comm.world_size)
        self.module, self.no_sync = self.run, self._without_sums
        self._steps, self._reduces = 0, True
        # Of a pass; anything that is left of it was not done, because of an exception.
        self._stream: Iterator[Instruction] = iter(())
        self.most_held, self.activation_bytes = self.held_now(), 0

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        trained = [self.flats[number] for number in self.sums]
        for flat in trained:
            (flat.total if flat.gradient is None else flat.gradient).zero_()
        loss = self.add_gradients(inputs, targets, batch_size)
        self.weigh(batch_size)
        if self.update() and self.stage < 3:
            for flat in trained:
                share_only(self.comm, flat.chunks)
        self._steps += 1
        return loss

    @contextlib.contextmanager
    def _without_sums(self) -> Iterator[None]:
        self._reduces = self.stage > 1
        try:
            yield
        finally:
            self._reduces = True

    def _begin_pass(self, stream: Iterator[Instruction]) -> None:
        if next(self._stream, None) is not None:
            for flat in self.flats:
                flat.clear()
        self._stream = stream

    def _forward_backward(self, inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        sums = self.sums if self._reduces else ()
        self._begin_pass(sharded_pass(self.stage, self.uses, sums))
        measured = None if self.activation_bytes else HeldBytes(self.model)
        loss = targets.new_zeros((), dtype=torch.float64)
        if len(targets) or self.sync_batch_norm:
            with measured or contextlib.nullcontext():
                loss = super()._forward_backward(inputs, targets, weight)
        if measured:
            self.activation_bytes = measured.num_bytes
        # On a rank without samples this is all.
        self._go_to()
        return loss

    def run(self, inputs: Tensor) -> Tensor:
        """The model's outputs; when backward enters a unit, it calls a hook."""
        for number, layers in enumerate(self.units):
            self._go_to("forward", number)
            for layer in layers:
                inputs = layer(inputs)
            if inputs.requires_grad:
                inputs.register_hook(lambda _, n=number: self._go_to("backward", n))
        return inputs

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        self._begin_pass(sharded_pass(self.stage, self.uses, self.sums, backward=False))
        outputs = super().predict(inputs) if len(inputs) else None
        self._go_to()
        return outputs

    @torch.no_grad()
    def _go_to(self, kind: str = "", number: int = -1) -> None:
        """Carry out what comes before it, in one order on all ranks; by default all there is."""
        for instruction in self._stream:
            if instruction.kind == "backward" and self._steps < 2:
                self.most_held = max(self.most_held, self.held_now(), key=total_bytes)
            if instruction == Instruction(kind, number):
                return
            if instruction.kind not in ("forward", "backward"):
                getattr(self.flats[instruction.number], instruction.kind)()

    def held_now(self) -> dict[str, int]:
        """The bytes that are alive, by kind, counted by their storages.

        What a message is received into is not counted, nor what forward keeps for its backward.
        """
        mine = [p for flat in self.flats for p in (*flat.parameters, flat.shard)]
        states = self.optimizer.state if self.optimizer else {}
        kinds: dict[str, list[Any]] = {
            "in_flight": [flat.flying for flat in self.flats],
            "parameters": mine,
            "gradients": [tensor.grad for tensor in mine],
            "optimizer": [value for one in states.values() for value in one.values()],
        }
        seen, found = set[int](), {}
        for kind, some in kinds.items():
            tensors = (one.untyped_storage() for one in some if isinstance(one, Tensor))
            storages = {storage.data_ptr(): storage.nbytes() for storage in tensors}
            found[kind] = sum(storages[place] for place in storages.keys() - seen)
            seen |= storages.keys()
        return found

    def notes(self) -> dict[str, Any]:
        """Bytes by kind and rank, at most in set-up and in backward, and between steps.

        A collective call.
        """
        most = self.most_held | {"activations": self.activation_bytes}
        memory: dict[str, dict[str, list[int]]] = {}
        moments = {"setup": self.most_at_setup, "between_steps": self.held_now(), "most": most}
        for moment, held in moments.items():
            row = torch.tensor([*held.values()], device=self.comm.device)
            by_rank = torch.stack(all_gather(self.comm, row)).T.tolist()
            memory[moment] = dict(zip(held, by_rank))
        sizes = [sum(flat.sizes) for flat in self.flats]
        return {"memory": memory, "flats": sizes, "uses": self.uses, "trained": self.sums}

    def full_state(self) -> State:
        values = {}
        for flat in self.flats if self.stage == 3 else ():
            values |= {p: v.cpu() for p, v in zip(flat.parameters, flat.whole(flat.shard))}
        state = self.model.state_dict(keep_vars=True)
        return {name: values.get(v, v).detach().cpu().clone() for name, v in state.items()}

    def state(self) -> State:
        """Whole tensors, as from any technique: each flat's from one rank, in turn."""
        state = self.buffers() if self.comm.rank == 0 else State()
        for number, flat in enumerate(self.flats):
            parts: State = {"model/{}": flat.shard}
            for key, value in self.optimizer.state.get(flat.shard, {}).items():
                stored, tensor = as_tensor(f"{{}}/{key}", value)
                parts[stored] = tensor
            for place, part in parts.items():
                values = flat.whole(part) if part.dim() else [part] * len(flat.parameters)
                for p, value in zip(flat.parameters, values):
                    if number % self.comm.world_size == self.comm.rank:
                        state |= {place.format(name): value for name in self.names[p]}
        return state

    def buffers(self) -> State:
        """By their names in a checkpoint."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        named = self.model.state_dict().items()
        return {f"model/{name}": value for name, value in named if name not in parameters}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, buffer in self.buffers().items():
            buffer.copy_(state[name])
        # What an optimizer keeps once per parameter, such as a count of steps.
        single = {"step", "mu_product"}
        for parameter, parameter_names in self.names.items() if self.optimizer else ():
            for key, value in of_kind(f"optimizer/{parameter_names[0]}", state).items():
                if value.dim() == 0 and parameter.dim() > 0:
                    single.add(key)
        for flat in self.flats:
            names = [self.names[parameter][0] for parameter in flat.parameters]
            values = [state[f"model/{name}"] for name in names]
            flat.shard.copy_(flat.part(values))
            for parameter, value in zip(flat.parameters, values) if self.stage < 3 else ():
                parameter.copy_(value)
            for key in of_kind(f"optimizer/{names[0]}", state):
                values = [state[f"optimizer/{name}/{key}"] for name in names]
                # PyTorch's optimizers count steps on the host.
                value, device = values[0], "cpu"
                if key not in single:
                    value, device = flat.part(values), self.comm.device
                self.optimizer.state[flat.shard][key] = value.to(device, copy=True)
            for key, value in of_kind(f"number/{names[0]}", state).items():
                self.optimizer.state[flat.shard][key] = value.item()
