"""What every technique has in common: the calls of the training loop, with defaults.

A technique defines ``setup`` and ``step``, and overrides other calls only where it differs from
the defaults. There is one object per rank.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.local_gradients import LocalGradients
from labkit.strategies.state import (
    Held,
    State,
    copy_into,
    held_by,
    load_state_of_parameter,
    named,
    of_kind,
    state_of_parameter,
)
from labkit.strategies.sync_batch_norm import GlobalBatch, batch_norms, convert
from labkit.strategies.update import LossScaler, Update
from labkit.workload.losses import CountedLoss, Loss, sum_cross_entropy
from labkit.workload.sampling import share

# Inputs [n, ...], targets [n], and the size of the global batch that they are a share of.
Batch = tuple[Tensor, Tensor, int]
# Seconds since the start, and the mean loss of the samples that were processed.
EpochEnd = tuple[float, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Strategy:
    """One technique on one rank: a dataclass, whose fields are the options that it takes.

    It is made before the ranks start, and each rank gets a copy. So ``__post_init__`` only refuses
    options that do not go together, and ``setup`` does everything else.

    Where ranks divide a batch, frozen parameters are not communicated, and a missing gradient
    counts as zero. Such a run equals that of one device if no layer combines samples and none
    draws random numbers: with dropout each rank draws its own, and BatchNorm normalises each share
    by itself, unless ``sync_batch_norm`` gives it the global batch's statistics. (What a training
    run asks of a technique determines the methods and their number.)

    Attributes:
        servers: ranks 0 to ``servers`` - 1 serve the others, and compute no gradients.
        in_one_process: whether world size N means N ``devices`` in one process, not N ranks.
        survives_lost_workers: whether the run continues when a rank other than 0 dies.
        through_comm: whether all traffic passes through ``comm``, which counts it.
        optimizes: what an optimizer on one rank gets: all parameters of the ``model``, those of
            some of its ``layers``, or ``elements``: a flat tensor of a part of all parameters.
        replaces_buffers: whether rank 0's replace those of all other ranks before they are used.
        global_batch: what the ranks tell each other about a batch; None if they need not.
        loss: (outputs, targets) -> the sum over the samples. The loop sets it, and ``clip_norm``.
        instead: by option that makes no sense here, why, and what to use instead.
        optimizer: of this rank; None on a rank that makes no updates.
        model: this rank's whole model, on its device or on ``devices[0]``. A technique that does
            not hold it there overrides ``predict``, ``full_state`` and ``held``.
    """

    servers = 0
    straggler: tuple[int, float] | None = None
    in_one_process = False
    survives_lost_workers = False
    through_comm = True
    optimizes = "model"
    sync_batch_norm = False
    synchronised_by = "labkit"
    replaces_buffers = False
    global_batch: GlobalBatch | None = None
    loss: Loss = staticmethod(sum_cross_entropy)
    clip_norm: float | None = None
    instead: ClassVar[dict[str, str]] = {}
    gradients: LocalGradients
    scaler: LossScaler
    devices: Sequence[torch.device] = ()
    optimizer: Any = None
    comm: Comm
    model: nn.Module

    @classmethod
    def options(cls) -> list[str]:
        """The names of the options that this technique takes."""
        return list(inspect.signature(cls).parameters)

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError unless this technique can run with ``world_size``."""

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Place or replicate the model, the same on all ranks, and make optimizers."""
        raise NotImplementedError

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        """Forward, backward, synchronise, update; returns the sum of the losses, a scalar.

        ``inputs`` [n, ...] and ``targets`` [n] are this rank's part (n may be 0) of a global batch
        of ``batch_size`` samples, of whose mean loss the update uses the gradient.
        """
        raise NotImplementedError

    def update_of(self, parameters: Iterable[nn.Parameter], **options: Any) -> Update:
        """What ends a step, with the settings of the run; see ``Update``."""
        settings: dict[str, Any] = {"clip_norm": self.clip_norm, "scaler": self.scaler}
        return Update(self.optimizer, parameters, **(settings | options))

    @property
    def uses_gpu(self) -> bool:
        """Whether a batch that this rank reads goes to a GPU."""
        return any(device.type == "cuda" for device in (self.comm.device, *self.devices))

    @property
    def workers(self) -> range:
        """The ranks that divide each batch among themselves; any other ranks serve them."""
        return range(self.servers, self.comm.world_size) or range(1)

    def share(self) -> tuple[int, int]:
        """(index, count) of this rank's part of every batch; (0, 0) for one that only serves."""
        if self.comm.rank not in self.workers:
            return 0, 0
        return self.workers.index(self.comm.rank), len(self.workers)

    def part_of(self, batch: Tensor) -> Tensor:
        """This rank's samples of a global batch, [n] of [B]: what ``step`` gets."""
        if self.global_batch is None:
            return share(batch, *self.share())
        return torch.cat(self.global_batch.parts(batch))

    def updates_of(self, samples: int, world_size: int) -> int:
        """How many updates the technique makes of a global batch of ``samples``."""
        return 1

    def counted(self) -> Tensor:
        """Right predictions of this rank since the last call and of how many, float64 [2]."""
        counts = torch.zeros(2, dtype=torch.float64, device=self.comm.device)
        if isinstance(self.loss, CountedLoss):
            right, counts[1] = self.loss.take()
            counts[0] = right
        return counts

    def end_epoch(self) -> None:
        """Make equal on all ranks what differs after the steps, such as batch statistics."""

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode; None on a rank that does not get them."""
        self.model.eval()
        logits = self.model(inputs.to(self.devices[0] if self.devices else self.comm.device))
        self.model.train()
        return logits.to(self.comm.device)

    def full_state(self) -> State:
        """Parameters and buffers of the whole model, put together again, on the CPU."""
        state = self.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def held(self) -> Held:
        """What this rank has of the model."""
        return held_by(self.model)

    def state(self) -> State:
        """What this rank gives to a checkpoint, see ``strategies.state``; a collective call."""
        held, rank, state = self.held(), self.comm.rank, State()
        has_layers = self.optimizes == "layers"
        of_optimizer = self.optimizer_state(held.parameters)
        if has_layers or rank == 0:
            state |= named("optimizer", of_optimizer)
        if has_layers or rank == self.workers[0]:
            state |= named("model", held.tensors)
        if has_layers or (rank == 0 if self.replaces_buffers else rank in self.workers):
            state |= named("buffers", held.buffers)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what all ranks gave; without anything "own" if these were other ranks."""
        held = self.held()
        copy_into(held.tensors, of_kind("model", state))
        copy_into(held.buffers, of_kind("buffers", state))
        if self.optimizer is not None:
            self.load_optimizer_state(held.parameters, of_kind("optimizer", state))

    def optimizer_state(self, parameters: Mapping[str, Tensor]) -> State:
        """What the optimizer has of the parameters, as NAME/KEY; all ranks call it."""
        found = State()
        for name, parameter in parameters.items() if self.optimizer else ():
            found |= named(name, state_of_parameter(self.optimizer, parameter))
        return found

    def load_optimizer_state(self, parameters: Mapping[str, Tensor], state: State) -> None:
        for name, parameter in parameters.items():
            load_state_of_parameter(self.optimizer, parameter, of_kind(name, state))

    def rehearse(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        """Before ``load_state``: do what a first step leaves behind, beside its update."""

    def notes(self) -> dict[str, Any]:
        """Facts about the run that are special to the technique; the same keys on every rank."""
        if not self.sync_batch_norm or len(self.workers) < 2:
            return {}
        layers = len(batch_norms(self.model))
        return {"sync_batch_norm": {"by": self.synchronised_by, "layers": layers}}

    def sent(self) -> tuple[int, int] | None:
        """Messages and bytes that this rank has sent so far; None if they are not counted."""
        return (self.comm.messages, self.comm.bytes_sent) if self.through_comm else None

    def close(self) -> None:
        """Close what ``setup`` has opened; called last, on all ranks, unless a rank has failed."""


@dataclass(eq=False)
class OnShares(Strategy):
    """A technique whose workers hold the whole model, and each compute the gradients of a share.

    Args:
        accumulate, amp: see ``LocalGradients``; so is ``straggler`` of some of them.
        sync_batch_norm: of some of them, BatchNorm normalises with the statistics of the global
            batch.
    """

    accumulate: int = 1
    amp: str | None = None

    def __post_init__(self) -> None:
        if self.straggler and self.straggler[0] < self.servers:
            raise ValueError(
                f"straggler {self.straggler[0]}: this rank is a server, and a server computes no "
                f"gradients; choose a worker, rank {self.servers} or above"
            )

    def place(self, comm: Comm, model: nn.Module) -> None:
        """Take the model, whose BatchNorm layers share their statistics if that is asked for."""
        self.comm, self.model = comm, model.to(comm.device).train()
        if self.sync_batch_norm and comm.rank in self.workers:
            self.global_batch = convert(self.model, comm, self.workers, self.accumulate)

    def compute_with(self, module: nn.Module) -> None:
        """Compute gradients with ``module``: the model, or what wraps it."""
        self.gradients = LocalGradients(
            self.comm,
            module,
            loss=self.loss,
            accumulate=self.accumulate,
            amp=self.amp,
            straggler=self.straggler,
            global_batch=self.global_batch,
        )
        self.scaler = self.gradients.scaler


@dataclass(eq=False)
class OwnPaceStrategy(OnShares):
    """A technique whose workers do not wait for each other: ``train`` replaces ``step``.

    Rank 0 is the server, all other ranks are workers. They never stop together, so there are no
    checkpoints.

    Args:
        straggler: see ``LocalGradients``.

    Attributes:
        updates: on the server, (worker, staleness) of every update; set by ``setup``.
        accuracy: on the server, the part of the latest epoch's samples that was predicted right
            when their gradients were computed; NaN if that is not counted.
        lost: {rank: why} for the workers that died; set by ``setup``.
    """

    instead: ClassVar[dict[str, str]] = {
        "sync_batch_norm": "its workers wait for nobody, so there is no common batch whose "
        "statistics they could share; use parameter_server, ddp or ring_all_reduce"
    }
    servers = 1
    straggler: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.updates: list[Any] = []
        self.accuracy: Any = float("nan")
        self.lost: dict[int, str] = {}

    def check_ranks(self, world_size: int) -> None:
        if world_size < 2:
            raise ValueError(
                "an asynchronous parameter server needs a server and at least one worker, got "
                f"world_size {world_size}: use world_size 2 or more, or strategy single"
            )

    def updates_of(self, samples: int, world_size: int) -> int:
        # One for each worker's share, unless it is empty.
        return min(samples, world_size - 1)

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        """Train until the workers together have processed as many shares as all epochs have.

        ``batches`` are this rank's shares without end, ``steps`` of them an epoch: a rank that is
        ahead continues with the next epoch. Yields on the server alone, when an epoch is complete;
        the caller reads ``full_state`` before it continues.
        """
        raise NotImplementedError

    def right_of(self, samples: int) -> Tensor | float:
        """Right predictions of this rank's latest share, of ``samples``; NaN if not counted."""
        right, judged = self.loss.take() if isinstance(self.loss, CountedLoss) else (0, 0)
        return right if judged == samples else float("nan")

    def load_full_state(self, state: State) -> None:
        """Let ``predict`` use these parameters and buffers from now on."""
        self.model.load_state_dict(state)

    def notes(self) -> dict[str, Any]:
        """``staleness`` is [worker, staleness] of each update; ``lost_ranks`` is {rank: why}."""
        updates = [list(update) for update in self.updates]
        counts = [sum(u[0] == rank for u in updates) for rank in range(self.comm.world_size)]
        return {"staleness": updates, "updates_by_rank": counts, "lost_ranks": dict(self.lost)}
