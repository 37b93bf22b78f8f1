"""The base of all techniques: the calls of the training loop, and the end of a step.

A technique defines ``setup`` and ``step``, and overrides other calls only where it differs.
When the gradients are summed over the ranks, ``step`` ends with ``update``, the same for all:

0. **weight**: where the weight of a loss is known only after forward, gradients are multiplied by
   what they lack, the ``gradient_factor``.
1. **unscale**: in fp16, gradients below 6e-8 would become zero, so the loss was multiplied by a
   scale, and now the gradients are divided by it. If one is not finite, the update is skipped.
2. **clip**: if the norm of all gradients together exceeds ``clip_norm``, all are multiplied by
   ``clip_norm`` / (norm + 1e-6). Where ranks divide them, they add up the squares of their norms.
3. **step**: the optimizer changes the parameters.

(Clipping by value would be another step 2, which needs no norm and no message.)

Sources: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), section
3.2; for fp16 see ``precision``.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from labkit.collectives import naive_all_reduce
from labkit.engine.comm.comm import Comm, SubComm
from labkit.strategies.precision import Precision
from labkit.strategies.saved_state import SavedState, State
from labkit.strategies.traits import Traits
from labkit.workload.losses import CountedLoss, Loss, Weighing, sum_cross_entropy
from labkit.workload.samples import share

# Inputs [n, ...], targets [n], and the size of the global batch that they are a share of.
Batch = tuple[Tensor, Tensor, int]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Strategy:
    """One technique on one rank: a dataclass, whose fields are the options that it takes.

    It is made before the ranks start, and each rank gets a copy. So ``__post_init__``, after that
    of its base, only refuses options that do not go together, and ``setup`` does everything else.

    Attributes:
        servers: ranks 0 to ``servers`` - 1 serve the others, and compute no gradients.
        traits: what a run has to know before it starts; options may decide some of them.
        saved_state_class: the class of what goes to a checkpoint.
        loss: (outputs, targets) -> the sum of a share's losses. The loop sets it, and
            ``clip_norm``.
        weighing: the kind of number that divides the sum of the losses.
        step_weight: this rank's part of the weight of the last step's batch; None if it is the
            number of samples.
        optimizer, trained: this rank's (None where it makes no updates), and what it changes.
        norm_ranks: the ranks that divide the gradients among themselves; none if each has all.
        counted_elsewhere: parameters also held by a lower rank, which counts their norm.
        model: the whole model, on ``comm.device``. A technique that does not hold it there
            overrides ``run`` or ``predict``, and ``full_state``.
    """

    traits = Traits()
    saved_state_class: type[SavedState] = SavedState
    servers = 0
    straggler: tuple[int, float] | None = None
    sync_batch_norm = False
    amp: str | None = None
    loss: Loss = staticmethod(sum_cross_entropy)
    weighing = Weighing.SAMPLES
    step_weight: Tensor | float | None = None
    clip_norm: float | None = None
    devices: Sequence[Any] = ()
    optimizer: Any = None
    norm_ranks: Sequence[int] = ()
    counted_elsewhere: Collection[Tensor] = frozenset()
    trained: list[nn.Parameter]
    comm: Comm
    model: nn.Module

    def __post_init__(self) -> None:
        self.devices = [torch.device(name) for name in self.devices]

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Place or replicate the model, the same on all ranks, and make optimizers."""
        raise NotImplementedError

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        """Forward, backward, synchronize, update; returns the sum of the losses, a scalar.

        ``inputs`` [n, ...] and ``targets`` [n] are this rank's part (n may be 0) of a global batch
        of ``batch_size`` samples, of whose mean loss the update uses the gradient.
        """
        raise NotImplementedError

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of a forward, and the scale of the loss."""
        return Precision(self.amp)

    # The end of a step, for ``step`` to call.

    @torch.no_grad()
    def gradient_factor(self, batch_size: int) -> Tensor | float | None:
        """The factor from (sum of gradients) / ``batch_size`` to the gradient of the mean loss.

        None if the weight of a batch is its number of samples. If it depends on the data, all
        ranks of ``comm`` add up theirs, one float64, by ``naive_all_reduce``. A batch that weighs
        nothing, as all of it is ignored, has no gradient; PyTorch's mean over nothing is NaN, with
        a gradient of zeros, too.
        """
        if self.weighing is Weighing.NOTHING:
            return batch_size
        if self.weighing is Weighing.SAMPLES or not isinstance(self.loss, CountedLoss):
            return None
        self.step_weight = self.loss.take_step()
        weight = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        weight += torch.as_tensor(self.step_weight).to(weight)
        if self.comm.world_size > 1:
            naive_all_reduce(self.comm, weight)
        return torch.where(weight > 0, batch_size / weight, 0)

    @torch.no_grad()
    def update(self, factor: Tensor | float | None = None) -> bool:
        """End a step: weight, unscale, clip, step; returns False if an overflow has it skipped.

        A missing gradient counts as zeros, as in a sum over ranks: an optimizer would leave out
        its parameter, but changes one whose gradient is zero by its momentum or weight decay.
        """
        with self.comm.span("update"):
            gradients: list[Tensor] = []
            for parameter in self.trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
                if isinstance(factor, Tensor):
                    parameter.grad.mul_(factor.to(parameter.device))
                elif factor is not None:
                    parameter.grad.mul_(factor)
            scaler = self.precision.scaler
            scaler.unscale(gradients)
            norm = torch.zeros(())
            if self.clip_norm is not None or scaler.enabled:
                norm = self._total_norm()
            if scaler.enabled:
                overflowed = not bool(norm.isfinite())
                scaler.update(overflowed)
                if overflowed:
                    return False
            if self.clip_norm is not None:
                clip_grads_with_norm_(self.trained, self.clip_norm, norm)
            if self.optimizer:
                self.optimizer.step()
        return True

    def _total_norm(self) -> Tensor:
        """The norm of all gradients together; a collective call where ranks divide them."""
        gradients = []
        for parameter in self.trained:
            gradient = parameter.grad
            is_counted = parameter not in self.counted_elsewhere
            if is_counted and gradient is not None and gradient.numel():
                gradients.append(gradient)
        norm = get_total_norm(gradients).double()
        if self.norm_ranks:
            square = norm.square().to(self.comm.device)
            norm = naive_all_reduce(SubComm(self.comm, self.norm_ranks), square).sqrt()
        return norm

    # What a run asks of a technique.

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError unless this technique can run with ``world_size``."""

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        """Raise ValueError unless so many ranks can train ``model`` with ``loss``."""

    @property
    def workers(self) -> range:
        """The ranks that divide each batch among themselves; any other ranks serve them."""
        return range(self.servers, self.comm.world_size) or range(1)

    def share_index(self) -> tuple[int, int]:
        """(index, count) of this rank's part of every batch; (0, 0) for one that only serves."""
        if self.traits.takes_whole_batch:
            return 0, 1
        if self.comm.rank not in self.workers:
            return 0, 0
        return self.workers.index(self.comm.rank), len(self.workers)

    def part_of(self, batch: Tensor) -> Tensor:
        """This rank's samples of a global batch, [n] of [B]: what ``step`` gets."""
        return share(batch, *self.share_index())

    def updates_of(self, samples: int, world_size: int) -> int:
        """The number of updates that the technique makes of a global batch of ``samples``."""
        return 1

    def end_epoch(self) -> None:
        """Make equal on all ranks what differs after the steps, such as batch statistics."""

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode; None on a rank that does not get them."""
        self.model.eval()
        # In the dtypes of training, as stages do: a technique does not change what is judged.
        with self.precision.autocast(self.comm.device):
            outputs = self.precision.wide(self.run(inputs))
        self.model.train()
        return outputs.to(self.comm.device)

    def run(self, inputs: Tensor) -> Tensor:
        """The model's outputs."""
        return self.model(inputs)

    def full_state(self) -> State:
        """Parameters and buffers of the whole model, put together again, on the CPU."""
        state = self.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def start_note(self) -> str:
        """Return a line that a run prints before it starts; "" for none."""
        return ""

    def notes(self) -> dict[str, Any]:
        """Facts about the run that are special to the technique; the same keys on every rank."""
        return {}

    def sent(self) -> tuple[int, int] | None:
        """Messages and bytes that this rank has sent so far; None if they are not counted."""
        return (self.comm.messages, self.comm.bytes_sent) if self.traits.through_comm else None

    def close(self) -> None:
        """Close what ``setup`` has opened; called last, on all ranks, unless a rank has failed."""


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient; a tied one comes once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_dense(parameter: Tensor) -> None:
    """Replace the gradient that a layer with ``sparse=True`` computes by a dense one.

    An optimizer skips weight decay and momentum of rows that a sparse gradient does not have.
    """
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
