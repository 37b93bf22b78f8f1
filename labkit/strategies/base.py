"""What every technique has in common: the hooks that the training loop calls, with defaults.

A technique states how it sets up and how it takes a step; everything else it inherits, unless it
differs. One object per rank.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm

# Inputs [n, ...], targets [n], and the size of the global batch that they are a share of.
Batch = tuple[Tensor, Tensor, int]
# Seconds since the start, and the mean loss of the samples that were worked through.
EpochEnd = tuple[float, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Strategy:
    """One technique on one rank. The parameters of its constructor are the options it takes.

    It is made before the ranks start and travels to each of them, so its constructor refuses
    options that do not go together, and ``setup`` does everything else.

    Where samples are divided, frozen parameters are left out, and a parameter without a gradient
    counts as zero. With dropout no run equals one device: each rank draws its own random numbers.

    Attributes:
        in_one_process: world size N means N ``devices`` in one process instead of N ranks.
        devices: of a technique in one process, one per replica or stage.
        survives_lost_workers: the run continues when a rank other than 0 dies.
        through_comm: all its traffic passes through ``comm``, which counts it.
        comm, model: set by ``setup``; ``model`` is this rank's whole model, on its device or on
            ``devices[0]``. A technique that does not hold one there has its own ``predict`` and
            ``full_state``.
    """

    in_one_process = False
    survives_lost_workers = False
    through_comm = True
    devices: Sequence[torch.device] = ()
    comm: Comm
    model: nn.Module

    @classmethod
    def options(cls) -> list[str]:
        """The names of the options that this technique takes."""
        return list(inspect.signature(cls).parameters)

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError unless this technique can run with ``world_size``."""

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Place or replicate ``model`` (the same seeded one on every rank) and make optimizers."""
        raise NotImplementedError

    @property
    def workers(self) -> range:
        """The ranks that divide each batch among themselves; any others serve them."""
        return range(self.comm.world_size)

    def share(self) -> tuple[int, int]:
        """(index, count): this rank works on part ``index`` of ``count`` of every batch.

        (0, 0) for a rank that works on no samples and serves the others.
        """
        if self.comm.rank not in self.workers:
            return 0, 0
        return self.workers.index(self.comm.rank), len(self.workers)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        """Forward, backward, synchronise, update; returns the sum of the losses, a scalar.

        ``inputs`` [n, C, H, W] and ``targets`` [n] are this rank's part (n may be 0) of a global
        batch of ``batch_size`` samples. The update is that of the mean over the global batch.
        """
        raise NotImplementedError

    def end_epoch(self) -> None:
        """Make equal on all ranks what the steps leave different, such as batch statistics."""

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode; the model is left in training mode.

        None on a rank that does not obtain them, because it holds only a part of the model.
        """
        self.model.eval()
        logits = self.model(inputs.to(self.devices[0] if self.devices else self.comm.device))
        self.model.train()
        return logits.to(self.comm.device)

    def full_state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, put together again, on the CPU."""
        state = self.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def notes(self) -> dict[str, Any]:
        """What is special about the run, for the report; the same keys on every rank."""
        return {}

    def sent(self) -> tuple[int, int] | None:
        """Messages and bytes that this rank has sent so far; None where nobody counts them."""
        return (self.comm.messages, self.comm.bytes_sent) if self.through_comm else None

    def close(self) -> None:
        """End what ``setup`` opened. Called last, on all ranks, unless one has failed."""


class OwnPaceStrategy(Strategy):
    """A technique whose workers do not wait for each other: ``train`` replaces ``step``.

    Rank 0 serves, the others work.

    Attributes:
        updates: on the server, (worker, staleness) of every update; set by ``setup``.
        lost: by worker that died, why; set by ``setup``.
    """

    updates: Sequence[Sequence[int]]
    lost: dict[int, str]

    def check_ranks(self, world_size: int) -> None:
        if world_size < 2:
            raise ValueError(
                "an asynchronous parameter server needs a server and at least one worker, got "
                f"world_size {world_size}: use world_size 2 or more, or strategy single"
            )

    @property
    def workers(self) -> range:
        return range(1, self.comm.world_size)

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        """Train until the samples of all epochs have been worked through, by whichever rank.

        Args:
            batches: this rank's share of one batch after another, without end: a rank that is
                ahead continues with its share of the next epoch. n may be 0.
            steps: global batches per epoch.
            epochs: to train for.

        Yields, on the server, an ``EpochEnd`` whenever an epoch is complete; ``full_state`` is
        read at once. The workers yield nothing.
        """
        raise NotImplementedError

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Let ``predict`` use these parameters and buffers from now on."""
        self.model.load_state_dict(state)

    def notes(self) -> dict[str, Any]:
        """``staleness``: [worker, staleness] of every update; ``updates_by_rank``; ``lost_ranks``,
        {rank: why}. Rank 0 knows them."""
        updates = [list(update) for update in self.updates]
        counts = [sum(u[0] == rank for u in updates) for rank in range(self.comm.world_size)]
        return {"staleness": updates, "updates_by_rank": counts, "lost_ranks": dict(self.lost)}
