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

Each rank sends 2, 2 and 3 (P - 1)/P x S bytes per step in stages 1, 2 and 3. In memory, S bytes of
what is divided become S/P; ``costs.memory`` also counts what is under way. ``schedules.sharding``
has the order of the messages.

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

from labkit.collectives.ring import all_gather, share_only
from labkit.engine.comm.comm import Comm
from labkit.schedules.bucket_assignment import MIB
from labkit.schedules.sharding import Instruction, sharded_pass
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.flat_parameter import OPERATIONS, Flat
from labkit.strategies.on_shares import OnShares
from labkit.strategies.saved_state import SavedState, State, as_tensor, of_kind
from labkit.strategies.traits import Division, Traits
from labkit.units import check_integer
from labkit.workload.layers import HeldBytes, layers_of
from labkit.workload.losses import Loss


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
    least_bytes = 0
    if stage == 1:
        # Every message has a fixed cost. In stages 2 and 3 large units would take memory.
        least_bytes = MIB
    units = group_layers(layers_of(model), least_bytes)
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
        state = State()
        if sharded.comm.rank == 0:
            state = self.buffers()
        for number, flat in enumerate(sharded.flats):
            # {} takes the names of the flat's parameters.
            shards: State = {"model/{}": flat.shard}
            for key, value in sharded.optimizer.state.get(flat.shard, {}).items():
                stored, tensor = as_tensor(f"{{}}/{key}", value)
                shards[stored] = tensor
            for stored, shard in shards.items():
                # One number, such as a count of steps, is the same for all.
                values = [shard] * len(flat.parameters)
                if shard.dim():
                    values = flat.full_values(shard)
                if number % sharded.comm.world_size == sharded.comm.rank:
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
        single_numbers = self.single_numbers(state)
        optimizer_state = sharded.optimizer.state
        for flat in sharded.flats:
            names = [sharded.names[parameter][0] for parameter in flat.parameters]
            values = [state[f"model/{name}"] for name in names]
            flat.shard.copy_(flat.shard_of(values))
            if sharded.stage < 3:
                for parameter, value in zip(flat.parameters, values):
                    parameter.copy_(value)
            for key, first_value in of_kind(f"optimizer/{names[0]}", state).items():
                if key in single_numbers:
                    # PyTorch's optimizers count steps on the host.
                    value = first_value.to("cpu", copy=True)
                else:
                    values = [state[f"optimizer/{name}/{key}"] for name in names]
                    value = flat.shard_of(values).to(sharded.comm.device, copy=True)
                optimizer_state[flat.shard][key] = value
            for key, value in of_kind(f"number/{names[0]}", state).items():
                optimizer_state[flat.shard][key] = value.item()

    def single_numbers(self, state: Mapping[str, Tensor]) -> set[str]:
        """The keys under which an optimizer keeps one number per parameter, as it counts steps.

        A parameter without dimensions does not tell: its momentum is one number, too. So the keys
        of PyTorch's optimizers are here in any case.
        """
        keys = {"step", "mu_product"}
        for parameter, names in self.strategy.names.items():
            for key, value in of_kind(f"optimizer/{names[0]}", state).items():
                if value.dim() == 0 and parameter.dim() > 0:
                    keys.add(key)
        return keys


@dataclass(eq=False)
class Sharded(OnShares):
    """Synchronous data parallelism whose ranks hold a part of what they update.

    A unit is a layer with parameters and the parameterless layers after it; in stage 1, layers of
    1 MiB together. A parameter belongs to the first unit that uses it; for another one (a tied
    parameter) stage 3 gathers it once more. The model is a chain of layers, see
    ``workload.layers``.

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
        self.trained = [flat.shard for flat in self.flats if flat.trained]
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
        trained = [flat for flat in self.flats if flat.trained]
        for flat in trained:
            flat.zero_gradient()
        loss = self.add_gradients(inputs, targets, batch_size)
        factor = self.gradient_factor(batch_size)
        if self.update(factor) and self.stage < 3:
            for flat in trained:
                share_only(self.comm, flat.chunks)
        self._steps += 1
        return loss

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
    def _run_until(self, target: Instruction | None) -> None:
        """Execute the instructions before ``target``, in one order on all ranks; None: all."""
        for instruction in self._instructions:
            if instruction.kind == "backward" and self._steps < 2:
                self._note_peak("most")
            if instruction == target:
                return
            if instruction.kind in OPERATIONS:
                OPERATIONS[instruction.kind](self.flats[instruction.number])

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

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        self._begin_pass(sharded_pass(self.stage, self.uses, self.trained_flats, backward=False))
        outputs = None
        if len(inputs):
            outputs = super().predict(inputs)
        self._run_until(None)
        return outputs

    def live_bytes(self) -> dict[str, int]:
        """The bytes that are alive, by kind, counted by their storages.

        What a message is received into is not counted, nor what forward keeps for its backward.
        """
        parameters: list[nn.Parameter] = []
        for flat in self.flats:
            parameters += [*flat.parameters, flat.shard]
        optimizer_tensors: list[Any] = []
        if self.optimizer:
            for state in self.optimizer.state.values():
                optimizer_tensors += state.values()
        tensors_by_kind: dict[str, list[Any]] = {
            "in_flight": [flat.in_flight for flat in self.flats],
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer": optimizer_tensors,
        }
        bytes_by_kind = dict.fromkeys(tensors_by_kind, 0)
        counted = set[int]()  # addresses of the storages that are counted already
        for kind, tensors in tensors_by_kind.items():
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    continue
                storage = tensor.untyped_storage()
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
