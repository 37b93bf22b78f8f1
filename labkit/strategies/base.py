"""The protocol of a strategy: what a technique has to say for itself."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm

Batch = tuple[Tensor, Tensor, int]


EpochEnd = tuple[float, Tensor]


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Strategy(Protocol):
    """What a technique has to say for itself; one object a rank.

    One that has something to end (connections of its own) has ``close()``, too: called last, on
    all ranks, unless one has failed. One whose traffic goes past ``comm`` has ``sent()``: the
    messages and bytes that this rank has sent so far, or None where nobody counts them.
    """

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Place or replicate ``model`` (the same seeded one on every rank) and make optimizers."""

    def share(self) -> tuple[int, int]:
        """(index, count): this rank works on part ``index`` of ``count`` of every batch.

        (0, 0) is a rank that works on no samples and serves the others.
        """

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        """Forward, backward, synchronise, update; returns the sum of the losses, a scalar.

        ``inputs`` [n, C, H, W] and ``targets`` [n] are this rank's part (n may be 0) of a global
        batch of ``batch_size`` samples. The update is that of the mean over the global batch.
        """

    def predict(self, inputs: Tensor) -> Tensor | None:
        """Logits [n, classes] in evaluation mode, without gradients.

        None on a rank that does not come by them: one that holds a part of the model.
        """

    def end_epoch(self) -> None:
        """Bring together what a step leaves apart (batch statistics, say)."""

    def full_state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, put together again, on the CPU."""


class OwnPaceStrategy(Protocol):
    """A technique whose ranks do not keep step: it runs the epochs by itself.

    ``setup``, ``predict`` and ``full_state`` are those of ``Strategy``; ``share`` is read before
    the run starts, and (0, 0) is a rank that serves.
    """

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        """Train until the samples of all epochs have been worked through, by whichever rank.

        Args:
            batches: this rank's share of batch after batch, without end: a rank that is ahead goes
                on with its share of the next epoch. (inputs [n, C, H, W], targets [n], size of the
                global batch), n may be 0.
            steps: global batches an epoch.
            epochs: to train for.

        Yields, on the rank that holds the parameters: (seconds since the start, mean loss of the
        samples that were worked through) whenever an epoch is through; ``full_state`` is then read
        at once. The others yield nothing.
        """

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Let ``predict`` use these parameters and buffers from here on."""

    def notes(self) -> dict[str, Any]:
        """What is special about the run, for the report; the same keys on every rank."""
