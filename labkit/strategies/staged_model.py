"""The base of techniques that cut a model into stages, and pass tensors from one to the next.

Rank s of P holds stage s. Going forward it receives an activation from rank s - 1, runs its
layers, and sends the output to rank s + 1; going backward it receives the gradient of that
output, and sends the gradient of its own input to rank s - 1.

A rank may hold V stages: its **chunk** c is stage c P + s, and rank P - 1 sends on to rank 0.

A ``Partition`` says who has what, a ``Stage`` computes, ``Hops`` are the messages, and an
``ActivationMeter`` counts what is kept for backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast, naive_all_reduce
from labkit.engine.comm.comm import Comm, SubComm
from labkit.schedules.pipeline import NAIVE, Action, Hop, messages_of
from labkit.schedules.timetable import instructions
from labkit.strategies.base import MakeOptimizer, Strategy, make_dense
from labkit.strategies.hops import Hops
from labkit.strategies.partition import Partition
from labkit.strategies.saved_state import SavedState, State
from labkit.strategies.stage import ActivationMeter, Stage
from labkit.strategies.traits import Division, Traits
from labkit.workload.layers import layers_of, meta_copy


class StagedState(SavedState):
    """The tensors of a rank's own layers."""

    def held(self) -> tuple[State, dict[str, nn.Parameter]]:
        return self.strategy.tensors, self.strategy.parameters


@dataclass(eq=False)
class StagedModel(Strategy):
    """The base of the techniques that cut a model into stages; they add ``step``.

    Every rank is given the same seeded model and keeps its own layers. A parameter that layers on
    several stages share is on each of them, and its gradients are summed. No gradient crosses a
    cut if nothing before it is trained. With ``amp``, float32 crosses a cut in the half dtype.
    With ``recompute`` a backward begins with its forward again: see ``Stage``.

    Attributes:
        split_points: layers that begin a stage, one fewer than there are stages.
        stage_comm: the Comm of the ranks that have stages, in the order of their first ones.
        stage_rank: s, this rank's number in ``stage_comm``.
        partition: which rank has which layers, and what crosses the cuts.
        stages, module: by chunk this rank's stages; the layers of all of them.
        parameters: this rank's, by the names that the model gives them.
        loss_sum: the sum of the losses so far in this step, on the last stage.
        meter: counts the bytes kept for backwards, in the first step.
        stages_per_rank: V.
        pipelining: the schedule, and whether messages move beside the actions.
    """

    split_points: Sequence[int] = ()
    amp: str | None = field(default=None, kw_only=True)
    recompute: bool = field(default=False, kw_only=True)
    saved_state_class = StagedState
    traits = Traits(takes_whole_batch=True, division=Division.LAYERS)
    stages_per_rank = 1
    pipelining = NAIVE

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm = comm
        # Names and shapes of all layers, without the other stages' memory.
        meta_model = meta_copy(model)
        self.stage_comm = self.lay_out(comm, model)
        self.stage_rank = self.stage_comm.rank
        self.num_ranks = self.stage_comm.world_size
        self.is_first = self.stage_rank == 0
        self.is_last = self.stage_rank == self.num_ranks - 1
        self.partition = Partition(
            meta_model, self.split_points, self.num_ranks, self.stages_per_rank, self.precision
        )
        self.split_points = self.partition.split_points
        self._make_stages(model)
        self._name_tensors(model)
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = None
        if self.trained:
            self.optimizer = make_optimizer(self.trained)
        self.norm_ranks = range(self.num_ranks)
        self._is_running = False  # a step

    def _make_stages(self, model: nn.Module) -> None:
        """Keep this rank's layers, and move them to its device."""
        partition = self.partition
        # The whole model's ``train``, which may keep some layers in evaluation mode.
        layers = layers_of(model.train())
        own_layers = []
        for index in partition.stages_of(self.stage_rank):
            start, end = partition.bounds[index]
            own_layers.append(nn.Sequential(*layers[start:end]))
        self.module = nn.Sequential(*own_layers)
        self.module.to(self.comm.device)
        self._in_training = [module for module in self.module.modules() if module.training]
        self.meter = ActivationMeter(self.module)
        self.stages = []
        for index, stage_layers in zip(partition.stages_of(self.stage_rank), own_layers):
            stage = Stage(
                layers=stage_layers,
                index=index,
                comm=self.comm,
                precision=self.precision,
                meter=self.meter,
                loss_fn=self.scaled_loss,
                is_last=index == partition.num_stages - 1,
                has_backward=index >= partition.first_trained,
                returns_gradient=index > partition.first_trained,
                cuts_backward=self.pipelining.cuts_backward,
                recompute=self.recompute,
            )
            self.stages.append(stage)

    def _name_tensors(self, model: nn.Module) -> None:
        """Name this rank's parameters and buffers as the model does."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        own_keys = {t: key for key, t in self.module.state_dict(keep_vars=True).items()}
        # By key of the model, that of this rank's ``module``.
        self._own_keys: dict[str, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        state = model.state_dict(keep_vars=True)
        for key, rank in self.partition.rank_of.items():
            if rank == self.stage_rank:
                tensor = state[key]
                self._own_keys[key] = own_keys[tensor]
                if isinstance(tensor, nn.Parameter):
                    self.parameters[names[tensor]] = tensor
        # (With a copy of a tied parameter that another rank counts.)
        self.counted_elsewhere = set()
        for name, ranks in self.partition.tied.items():
            if self.stage_rank in ranks[1:]:
                self.counted_elsewhere.add(self.parameters[name])

    @property
    def tensors(self) -> State:
        """This rank's parameters and buffers by the model's names; a forward may replace one."""
        state = self.module.state_dict(keep_vars=True)
        return {key: state[own_key] for key, own_key in self._own_keys.items()}

    def lay_out(self, comm: Comm, model: nn.Module) -> Comm:
        """Return the ranks that divide the stages; a mesh takes some, and may cut the layers."""
        return comm

    def unshard(self, tensor: Tensor) -> Tensor:
        """Return the whole parameter or buffer; a mesh may have left this rank a shard of it."""
        return tensor.detach()

    def start_step(
        self, inputs: Tensor, targets: Tensor, batch_size: int, micro_batches: int = 1
    ) -> int:
        """Cut the batch into micro-batches, as evenly as possible; returns their number.

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
        # As .data, each may be changed in place: views of one tensor would share its version.
        self.inputs = [part.data for part in inputs.tensor_split(max(1, count))]
        self._batch_size = batch_size
        self.loss_sum = targets.new_zeros((), dtype=torch.float64)
        self.hops = Hops(self.stage_comm, beside=self.pipelining.hops_beside)
        self.meter.counters.clear()
        for stage in self.stages:
            stage.start_step(targets.tensor_split(max(1, count)))
        for parameter in self.trained:
            parameter.grad = None
        return count

    def run_step(
        self, inputs: Tensor, targets: Tensor, batch_size: int, micro_batches: int
    ) -> Tensor:
        """Execute this rank's ``instructions`` of a step, and update; returns ``loss_sum``."""
        count = self.start_step(inputs, targets, batch_size, micro_batches)
        program = instructions(
            self.pipelining,
            self.stage_rank,
            num_ranks=self.num_ranks,
            num_micro_batches=count,
            first_trained=self.partition.first_trained,
            stages_per_rank=self.stages_per_rank,
        )
        for instruction in program:
            if isinstance(instruction, Hop):
                self._run_hop(instruction)
            else:
                self._run_action(instruction)
        self.hops.wait()
        self.end_step()
        return self.loss_sum

    def _run_hop(self, hop: Hop) -> None:
        landing = None
        if hop.recv:
            # The gradient of a stage's output is as large as what enters the next stage.
            stage = self.stages[hop.recv.chunk].index + (hop.recv.kind == "gradient")
            landing = self._landing(self.inputs[hop.recv.micro_batch], stage)
        self.hops.run(hop, landing)

    def _landing(self, inputs: Tensor, stage: int) -> Tensor:
        """Memory for what enters ``stage`` if ``inputs`` [n, ...] enter the model."""
        return torch.empty_like(self.partition.boundary(inputs, stage), device=self.comm.device)

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
            num_stages=self.partition.num_stages,
            first_trained=self.partition.first_trained,
        )
        received = None
        if needed:
            received = self.hops.take(needed)
        if action.kind != "forward":
            result = stage.backward(micro_batch, received, action.kind)
        elif received is None:
            result = stage.forward(micro_batch, self.inputs[micro_batch])
        else:
            result = stage.forward(micro_batch, received)
        if made:
            if result is None:
                # Layers that detach their input, or do not use it, have no gradient of it.
                result = self._landing(self.inputs[micro_batch], stage.index).zero_()
            self.hops.hand_on(made, result)

    def scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that backward begins with; the loss itself is added to ``loss_sum``."""
        loss = self.loss(outputs, targets)
        self.loss_sum += loss.detach()
        return loss * (self.precision.scaler.scale / self._batch_size)

    def end_step(self) -> None:
        """Complete the gradients when backward has ended, and update."""
        self.finish_backward()
        self.meter.is_on = False
        self._is_running = False
        factor = self.gradient_factor(self._batch_size)
        self._sum_tied_gradients()
        self.update(factor)

    def finish_backward(self) -> None:
        """Sum the gradients over other ranks than those of ``stage_comm``: a mesh has some."""

    def _sum_tied_gradients(self) -> None:
        for name, ranks in self.partition.tied.items():
            if self.stage_rank in ranks:
                parameter = self.parameters[name]
                make_dense(parameter)
                gradient = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    gradient = parameter.grad.contiguous()
                parameter.grad = naive_all_reduce(SubComm(self.stage_comm, ranks), gradient)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode on the last stage, None on the others."""
        value = inputs
        self.module.eval()
        for stage in self.stages:
            if stage.index > 0 and self.num_ranks > 1:
                value = self._landing(inputs, stage.index)
                self.stage_comm.recv(value, (self.stage_rank - 1) % self.num_ranks)
            value = stage.run(value)
            if not stage.is_last and self.num_ranks > 1:
                self.stage_comm.send(value, (self.stage_rank + 1) % self.num_ranks)
        for module in self._in_training:
            module.training = True
        return value if self.is_last else None

    def full_state(self) -> State:
        """All stages' parameters and buffers, on every rank: each rank broadcasts its own."""
        state = State()
        rank_of = self.partition.rank_of
        tensors = self.tensors
        for key, meta_tensor in self.partition.meta_model.state_dict().items():
            value = torch.empty_like(meta_tensor, device=self.comm.device)
            if rank_of[key] == self.stage_rank:
                value.copy_(self.unshard(tensors[key]))
            state[key] = broadcast(self.stage_comm, value, root=rank_of[key]).cpu()
        return state

    def notes(self) -> dict[str, Any]:
        """The split points."""
        return {"split_points": list(self.split_points)}
