"""Sharded data parallelism (ZeRO): ranks divide among them what data parallelism holds P times.

The parameters of each unit, a layer or a few, form **flat** tensors (one per dtype; frozen ones
apart), cut into P chunks: one per rank, its **shard**. Each rank makes the update of its shard
alone, with its part of the optimizer's state.

**Stage 1** divides the optimizer's state. 1. Forward and backward, as in DDP; of the gradients
that are complete, share_reduce sums each rank's chunk, while the rest of backward runs. 2. Each
rank updates its shard. 3. share_only gives the new values to all.

**Stage 2** divides the gradients, too: a layer's exist as a whole from when backward enters the
layer until their sums are added to the shards' gradients.

**Stage 3** divides the parameters, too. A layer's are gathered (share_only) before its forward and
again before its backward, while the layer before is computing, and freed after; step 3 is gone.

Bytes sent per rank and step: 2, 2 and 3 (P - 1)/P x S. In memory, S bytes of each kind become S/P,
and what is under way: ``costs.memory``. In which order: ``schedules.sharding``.

Symbols: P ranks, N elements of a flat, S bytes of the trained parameters. Sources: Rajbhandari et
al., "ZeRO: memory optimizations toward training trillion parameter models" (2020), sections 5 and
7; Zhao et al., "PyTorch FSDP" (2023), section 3.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives.ring import all_gather, share_only, share_reduce, split_chunks
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.work import Work, work_queue_of
from labkit.schedules.bucket_assignment import MIB
from labkit.schedules.ring import owned_chunk
from labkit.schedules.sharding import Instruction, sharded_pass
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.flat_tensors import views_of
from labkit.strategies.on_shares import OnShares
from labkit.strategies.saved_state import SavedState, State, as_tensor, of_kind
from labkit.strategies.traits import Division, Traits
from labkit.units import check_integer
from labkit.workload.layers import HeldBytes, layers_of
from labkit.workload.losses import Loss


class Flat:
    """A flat parameter: some parameters in one tensor ``full`` [N], cut into ``chunks``, shards.

    ``shard`` is this rank's chunk, which its optimizer changes: in stage 3 a copy, as ``full`` has
    memory between ``unshard`` and ``reshard`` alone (a new flat is unsharded, too). The parameters
    may be on the host: this flat alone moves to the device. Their gradients are views of
    ``full_gradient`` [N]: in stage 1 always, else between ``allocate_gradient`` and ``wait``;
    ``shard_gradient`` is the shard's. ``in_flight`` is the tensor that is gathered ahead, or
    reduced. Which method executes which instruction of a pass: ``OPERATIONS``.
    """

    def __init__(self, comm: Comm, stage: int, parameters: list[nn.Parameter]):
        self.comm = comm
        self.stage = stage
        self.parameters = parameters
        self.trained = parameters[0].requires_grad
        self.num_elements = sum(parameter.numel() for parameter in parameters)
        values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.full = values.to(comm.device)
        self.full_bytes = self.full.nbytes
        for parameter, view in zip(parameters, views_of(self.full, parameters)):
            parameter.data = view
        self.owned = owned_chunk(comm.rank, comm.world_size)
        self.chunks = split_chunks(self.full, comm.world_size)
        our_chunk = self.chunks[self.owned]
        if stage == 3:
            our_chunk = our_chunk.clone()
        self.shard = nn.Parameter(our_chunk, self.trained)
        self.work: Work | None = None
        self.in_flight: Tensor | None = None
        self.full_gradient: Tensor | None = None
        self.shard_gradient = torch.zeros_like(our_chunk)
        if self.trained:
            if stage == 1:
                gradient = self.allocate_gradient()
                self.shard_gradient = split_chunks(gradient, comm.world_size)[self.owned]
            self.shard.grad = self.shard_gradient

    def unshard(self) -> None:
        """Begin the all-gather (share-only) of all ranks' shards into ``full``."""
        self.full.untyped_storage().resize_(self.full_bytes)

        def all_gather_shards(comm: Comm) -> None:
            self.chunks[self.owned].copy_(self.shard)
            share_only(comm, self.chunks)

        self.in_flight = self.full
        queue = work_queue_of(self.comm)
        self.work = queue.add("share_only", all_gather_shards, [self.full], [])

    def wait(self) -> None:
        """Wait until the last ``unshard`` or ``reduce`` has ended."""
        if self.work:
            with self.comm.span("wait"):
                self.work.wait()
        self.work = None
        self.in_flight = None

    def reshard(self) -> None:
        """Free the memory of ``full``; the shard stays."""
        # What autograd keeps of it are views: they show the values of the next unshard.
        self.full.untyped_storage().resize_(0)

    def allocate_gradient(self) -> Tensor:
        """Give the parameters gradients, zeros at first; returns ``full_gradient``."""
        if self.full_gradient is None:
            self.full_gradient = torch.zeros_like(self.full)
            views = views_of(self.full_gradient, self.parameters)
            for parameter, view in zip(self.parameters, views):
                parameter.grad = view
        return self.full_gradient

    def reduce(self) -> None:
        """Begin the reduce-scatter (share-reduce) of ``full_gradient``."""
        gradient = self.allocate_gradient()
        chunks = split_chunks(gradient, self.comm.world_size)

        def reduce_scatter_gradient(comm: Comm) -> None:
            share_reduce(comm, chunks)
            if self.stage > 1:
                self.shard_gradient += chunks[self.owned]

        queue = work_queue_of(self.comm)
        self.work = queue.add("share_reduce", reduce_scatter_gradient, [gradient], [])
        if self.stage > 1:
            self.in_flight = gradient
            self._drop_full_gradient()

    def _drop_full_gradient(self) -> None:
        self.full_gradient = None
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Drop what is left of a pass that an exception has ended."""
        self.wait()
        self.shard_gradient.zero_()
        if self.stage > 1:
            self._drop_full_gradient()
        if self.stage == 3:
            self.reshard()

    def full_values(self, shard: Tensor) -> list[Tensor]:
        """Values by parameter, from the ranks' shards of them; a collective call."""
        full = shard.new_empty(self.num_elements)
        chunks = split_chunks(full, self.comm.world_size)
        chunks[self.owned].copy_(shard.detach())
        share_only(self.comm, chunks)
        return views_of(full, self.parameters)

    def shard_of(self, values: list[Tensor]) -> Tensor:
        """This rank's shard of values by parameter, the reverse of ``full_values``."""
        full = torch.cat([value.flatten() for value in values])
        return split_chunks(full, self.comm.world_size)[self.owned]


# By the kind of an instruction; one method waits: a flat has one collective under way at a time.
OPERATIONS: dict[str, Callable[[Flat], object]] = {
    "gather": Flat.unshard,
    "wait": Flat.wait,
    "free": Flat.reshard,
    "begin": Flat.allocate_gradient,
    "reduce": Flat.reduce,
    "finish": Flat.wait,
}


def group_layers(layers: list[nn.Module], least_bytes: int) -> list[list[nn.Module]]:
    """Cut a chain into units: one is complete when it has more than ``least_bytes``."""
    units: list[list[nn.Module]] = []
    unit_bytes = 0
    for layer in layers:
        layer_bytes = sum(parameter.nbytes for parameter in layer.parameters())
        if not units or (layer_bytes and unit_bytes > least_bytes):
            units.append([])
            unit_bytes = 0
        units[-1].append(layer)
        unit_bytes += layer_bytes
    return units


def divide(
    model: nn.Module, stage: int
) -> tuple[list[list[nn.Module]], list[list[nn.Parameter]], list[list[int]]]:
    """Return the layers of each unit, the parameters of each flat, and each unit's flats.

    The parameters of a flat have one dtype, and are all trained or all frozen.
    """
    # Every message has a fixed cost. In stages 2 and 3 large units would take memory.
    units = group_layers(layers_of(model), least_bytes=MIB if stage == 1 else 0)
    flats: list[list[nn.Parameter]] = []
    flat_of: dict[nn.Parameter, int] = {}
    uses = []
    for layers in units:
        new_flats: dict[tuple[torch.dtype, bool], int] = {}
        used: list[int] = []
        for parameter in nn.ModuleList(layers).parameters():
            if parameter not in flat_of:
                kind = parameter.dtype, parameter.requires_grad
                if kind not in new_flats:
                    new_flats[kind] = len(flats)
                    flats.append([])
                flat_of[parameter] = new_flats[kind]
                flats[new_flats[kind]].append(parameter)
            if flat_of[parameter] not in used:
                used.append(flat_of[parameter])
        uses.append(used)
    return units, flats, uses


class ShardedState(SavedState):
    """Whole tensors, as from any technique: each flat's from one rank, in turn."""

    def collect(self) -> State:
        sharded = self.strategy
        state = self.buffers() if sharded.comm.rank == 0 else State()
        for number, flat in enumerate(sharded.flats):
            shards: State = {"model/{}": flat.shard}
            for key, value in sharded.optimizer.state.get(flat.shard, {}).items():
                stored, tensor = as_tensor(f"{{}}/{key}", value)
                shards[stored] = tensor
            for stored, shard in shards.items():
                # A tensor without dimensions, such as a count of steps, is the same for all.
                values = flat.full_values(shard) if shard.dim() else [shard] * len(flat.parameters)
                if number % sharded.comm.world_size != sharded.comm.rank:
                    continue
                for parameter, value in zip(flat.parameters, values):
                    for name in sharded.names[parameter]:
                        state[stored.format(name)] = value
        return state

    def buffers(self) -> State:
        """The model's buffers, by their names in a checkpoint."""
        sharded = self.strategy
        parameters = dict(sharded.model.named_parameters(remove_duplicate=False))
        state = sharded.model.state_dict()
        return {f"model/{name}": state[name] for name in state if name not in parameters}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        sharded = self.strategy
        for name, buffer in self.buffers().items():
            buffer.copy_(state[name])
        # Keys of what an optimizer keeps once per parameter, such as a count of steps.
        scalar_keys = {"step", "mu_product"}
        for parameter, names in sharded.names.items():
            for key, value in of_kind(f"optimizer/{names[0]}", state).items():
                if value.dim() == 0 and parameter.dim() > 0:
                    scalar_keys.add(key)
        for flat in sharded.flats:
            self._load_flat(flat, state, scalar_keys)

    def _load_flat(self, flat: Flat, state: Mapping[str, Tensor], scalar_keys: set[str]) -> None:
        sharded = self.strategy
        names = [sharded.names[parameter][0] for parameter in flat.parameters]
        values = [state[f"model/{name}"] for name in names]
        flat.shard.copy_(flat.shard_of(values))
        if sharded.stage < 3:
            for parameter, value in zip(flat.parameters, values):
                parameter.copy_(value)
        for key in of_kind(f"optimizer/{names[0]}", state):
            values = [state[f"optimizer/{name}/{key}"] for name in names]
            if key in scalar_keys:
                # PyTorch's optimizers count steps on the host.
                value = values[0].to("cpu", copy=True)
            else:
                value = flat.shard_of(values).to(sharded.comm.device, copy=True)
            sharded.optimizer.state[flat.shard][key] = value
        for key, value in of_kind(f"number/{names[0]}", state).items():
            sharded.optimizer.state[flat.shard][key] = value.item()


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
        flats: the flat parameters; those of one unit differ in dtype or in ``requires_grad``.
        uses: by unit, the numbers of the flats that it uses.
        trained_flats: the numbers of the flats that are trained.
        peaks: the ``live_bytes`` with the largest sum: at ``setup``, while the flats are made, and
            at ``most``, when backward enters a unit in one of the first two steps.
        activation_bytes: what the first forward kept for its backward.
    """

    stage: int = 3
    sync_batch_norm: bool = False
    saved_state_class = ShardedState
    traits = Traits(predicts_together=True, division=Division.ELEMENTS)
    runs_empty = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self.peaks: dict[str, dict[str, int]] = {}
        self._note_peak("setup")
        for parameters in flat_parameters:
            flat = Flat(comm, self.stage, parameters)
            self.flats.append(flat)
            self._note_peak("setup")
            if self.stage == 3:
                flat.reshard()
        self.names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(parameter, []).append(name)
        self.trained_flats = [number for number, flat in enumerate(self.flats) if flat.trained]
        self.trained = [self.flats[number].shard for number in self.trained_flats]
        self.optimizer = make_optimizer(self.trained)
        self.norm_ranks = range(comm.world_size)
        self.module = self.run
        self.no_sync = self._without_reduce
        self._reduces = True
        self._steps = 0
        # Instructions of a pass; any that are left were not done, because of an exception.
        self._instructions: Iterator[Instruction] = iter(())
        self._note_peak("most")
        self.activation_bytes = 0

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        trained = [self.flats[number] for number in self.trained_flats]
        for flat in trained:
            gradient = flat.shard_gradient if flat.full_gradient is None else flat.full_gradient
            gradient.zero_()
        loss = self.add_gradients(inputs, targets, batch_size)
        factor = self.gradient_factor(batch_size)
        if self.update(factor) and self.stage < 3:
            for flat in trained:
                share_only(self.comm, flat.chunks)
        self._steps += 1
        return loss

    @contextlib.contextmanager
    def _without_reduce(self) -> Iterator[None]:
        """A context for micro-batches before the last one: stage 1 reduces their sum once."""
        self._reduces = self.stage > 1
        try:
            yield
        finally:
            self._reduces = True

    def _begin_pass(self, instructions: Iterator[Instruction]) -> None:
        if next(self._instructions, None) is not None:
            for flat in self.flats:
                flat.clear()
        self._instructions = instructions

    def _forward_backward(self, inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        reduced = self.trained_flats if self._reduces else ()
        self._begin_pass(sharded_pass(self.stage, self.uses, reduced))
        meter = None if self.activation_bytes else HeldBytes(self.model)
        loss = targets.new_zeros((), dtype=torch.float64)
        if len(targets) or self.sync_batch_norm:
            with meter or contextlib.nullcontext():
                loss = super()._forward_backward(inputs, targets, weight)
        if meter:
            self.activation_bytes = meter.num_bytes
        # What follows the last backward; on a rank without samples the whole pass.
        self._run_until(None)
        return loss

    def run(self, inputs: Tensor) -> Tensor:
        """The model's outputs; when backward enters a unit, it calls a hook."""
        for number, layers in enumerate(self.units):
            self._run_until(Instruction("forward", number))
            for layer in layers:
                inputs = layer(inputs)
            if inputs.requires_grad:
                entered = Instruction("backward", number)
                inputs.register_hook(lambda _, entered=entered: self._run_until(entered))
        return inputs

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        self._begin_pass(sharded_pass(self.stage, self.uses, self.trained_flats, backward=False))
        outputs = super().predict(inputs) if len(inputs) else None
        self._run_until(None)
        return outputs

    @torch.no_grad()
    def _run_until(self, target: Instruction | None) -> None:
        """Execute the instructions before ``target``, in one order on all ranks; None: all."""
        for instruction in self._instructions:
            if instruction.kind == "backward" and self._steps < 2:
                self._note_peak("most")
            if instruction == target:
                return
            if instruction.kind in OPERATIONS:
                OPERATIONS[instruction.kind](self.flats[instruction.number])

    def live_bytes(self) -> dict[str, int]:
        """The bytes that are alive, by kind, counted by their storages.

        What a message is received into is not counted, nor what forward keeps for its backward.
        """
        parameters: list[nn.Parameter] = []
        for flat in self.flats:
            parameters += [*flat.parameters, flat.shard]
        optimizer_states = self.optimizer.state.values() if self.optimizer else ()
        tensors_by_kind: dict[str, list[Any]] = {
            "in_flight": [flat.in_flight for flat in self.flats],
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer": [value for state in optimizer_states for value in state.values()],
        }
        bytes_by_kind = dict.fromkeys(tensors_by_kind, 0)
        counted = set[int]()  # addresses of the storages that are counted already
        for kind, tensors in tensors_by_kind.items():
            storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
            for storage in storages:
                if storage.data_ptr() not in counted:
                    counted.add(storage.data_ptr())
                    bytes_by_kind[kind] += storage.nbytes()
        return bytes_by_kind

    def _note_peak(self, moment: str) -> None:
        live_bytes = self.live_bytes()
        peak = self.peaks.setdefault(moment, live_bytes)
        if sum(live_bytes.values()) > sum(peak.values()):
            self.peaks[moment] = live_bytes

    def notes(self) -> dict[str, Any]:
        """Bytes by kind and rank: peaks in setup and backward, and between steps; collective."""
        moments = {
            "setup": self.peaks["setup"],
            "between_steps": self.live_bytes(),
            "most": self.peaks["most"] | {"activations": self.activation_bytes},
        }
        memory: dict[str, dict[str, list[int]]] = {}
        for moment, bytes_by_kind in moments.items():
            row = torch.tensor(list(bytes_by_kind.values()), device=self.comm.device)
            by_rank = torch.stack(all_gather(self.comm, row)).T.tolist()
            memory[moment] = dict(zip(bytes_by_kind, by_rank))
        return {
            "memory": memory,
            "flats": [flat.num_elements for flat in self.flats],
            "uses": self.uses,
            "trained": self.trained_flats,
        }

    def full_state(self) -> State:
        values: dict[Tensor, Tensor] = {}
        if self.stage == 3:
            for flat in self.flats:
                for parameter, value in zip(flat.parameters, flat.full_values(flat.shard)):
                    values[parameter] = value.cpu()
        state = State()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            state[name] = values.get(tensor, tensor).detach().cpu().clone()
        return state
