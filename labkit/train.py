"""The training loop that all techniques share, and the protocol they fit into.

The loop owns the data, the epochs and the measurements; a strategy owns the model and the way the
ranks are kept together. So two techniques differ in nothing but the technique.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import ring_all_reduce
from labkit.comm import Comm
from labkit.config import RunConfig
from labkit.workload import Data, batch_slices, build_model, epoch_order, load_dataset, share

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_EVALUATION_BATCH = 512


class Strategy(Protocol):
    """What a technique has to say for itself; one object a rank."""

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Place or replicate ``model`` (the same seeded one on every rank) and make optimizers."""

    def share(self) -> tuple[int, int]:
        """(index, count): this rank works on part ``index`` of ``count`` of every batch."""

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        """Forward, backward, synchronise, update; returns the sum of the losses, a scalar.

        ``inputs`` [n, C, H, W] and ``targets`` [n] are this rank's part (n may be 0) of a global
        batch of ``batch_size`` samples. The update is that of the mean over the global batch.
        """

    def predict(self, inputs: Tensor) -> Tensor:
        """Logits [n, classes] in evaluation mode, without gradients."""

    def end_epoch(self) -> None:
        """Bring together what a step leaves apart (batch statistics, say)."""

    def full_state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, put together again, on the CPU."""


@dataclass(frozen=True)
class RankReport:
    """What one rank brings home from a training run. ``state`` is kept by rank 0 alone."""

    epochs: list[dict[str, float]]
    messages: int
    bytes_sent: int
    checksum: str
    state: dict[str, Tensor] | None


def fit(
    comm: Comm, config: RunConfig, make_strategy: Callable[[], Strategy], verbose: bool
) -> RankReport:
    """Train on this rank; the function that ``labkit.run`` calls on all of them."""
    if comm.device.type == "cuda":
        # TF32 rounds to 10 bits, and no run would equal another.
        torch.backends.cudnn.allow_tf32 = False
    dtype = getattr(torch, config.dtype)
    data = load_dataset(config.dataset, train_size=config.train_size, dtype=dtype)
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        input_shape=data.input_shape,
        seed=config.seed,
        dtype=dtype,
    )
    strategy = make_strategy()
    strategy.setup(comm, model, lambda parameters: _sgd(parameters, config))
    epochs, messages, bytes_sent = [], 0, 0
    for epoch in range(config.epochs):
        before = comm.messages, comm.bytes_sent
        start_s = time.perf_counter()
        loss_sum = _train_epoch(comm, config, data, strategy, epoch)
        seconds = time.perf_counter() - start_s
        # Evaluation stays outside the clock and the counters: it is not the technique's.
        messages += comm.messages - before[0]
        bytes_sent += comm.bytes_sent - before[1]
        epochs.append(_evaluate(comm, data, strategy, loss_sum) | {"seconds": seconds})
        if verbose and comm.rank == 0:
            _print_epoch(epoch, config.epochs, epochs[-1])
    state = strategy.full_state()
    kept = state if comm.rank == 0 else None
    return RankReport(epochs, messages, bytes_sent, checksum(state), kept)


def _sgd(parameters: Iterable[nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)


def _train_epoch(
    comm: Comm, config: RunConfig, data: Data, strategy: Strategy, epoch: int
) -> Tensor:
    """One pass over the training samples; returns this rank's sum of losses, float64 [1]."""
    order = epoch_order(len(data.train_targets), epoch=epoch, seed=config.seed)
    batches = batch_slices(order, config.batch_size)
    total = torch.zeros(1, dtype=torch.float64, device=comm.device)
    for number, batch in enumerate(batches):
        with comm.span("data"):
            mine = share(batch, *strategy.share())
            inputs = data.train_inputs[mine].to(comm.device)
            targets = data.train_targets[mine].to(comm.device)
        total += strategy.step(inputs, targets, len(batch)).detach()
        done = epoch * len(batches) + number + 1
        comm.progress(done, config.epochs * len(batches), f"steps, epoch {epoch + 1}")
    strategy.end_epoch()
    return total


def _evaluate(comm: Comm, data: Data, strategy: Strategy, loss_sum: Tensor) -> dict[str, float]:
    """Mean training loss of the epoch and accuracy on the held-out part, over all ranks."""
    correct = torch.zeros(1, dtype=torch.float64, device=comm.device)
    with comm.span("evaluate"):
        for batch in torch.arange(len(data.test_targets)).split(_EVALUATION_BATCH):
            mine = share(batch, *strategy.share())
            logits = strategy.predict(data.test_inputs[mine].to(comm.device))
            targets = data.test_targets[mine].to(comm.device)
            correct += (logits.argmax(dim=1) == targets).sum()
        sums = torch.cat([loss_sum, correct])
        if strategy.share()[1] > 1:
            ring_all_reduce(comm, sums)
    return {
        "loss": sums[0].item() / len(data.train_targets),
        "test_accuracy": sums[1].item() / len(data.test_targets),
    }


def _print_epoch(epoch: int, epochs: int, row: dict[str, float]) -> None:
    print(
        f"epoch {epoch + 1}/{epochs}: loss {row['loss']:.4f}, "
        f"held-out accuracy {row['test_accuracy']:.2%}, {row['seconds']:.2f} s"
    )


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over the samples: sums of parts add up to the whole, means do not."""
    return functional.cross_entropy(logits, targets, reduction="sum")


def checksum(state: dict[str, Tensor]) -> str:
    """SHA-256 of all values, bit for bit: equal on two ranks only when their replicas are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def largest_difference(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference between two states: max over tensors of |a - b| / |b|.

    The norm is each tensor's largest magnitude, so that values near zero do not decide.

    Raises:
        ValueError: the states do not hold the same tensors.
    """
    if state.keys() != other.keys():
        raise ValueError(f"states differ in tensors: {sorted(state.keys() ^ other.keys())}")
    worst = 0.0
    for name, tensor in other.items():
        if not tensor.numel():
            continue
        scale = max(tensor.double().abs().max().item(), torch.finfo(torch.float64).tiny)
        difference = (state[name].double() - tensor.double()).abs().max().item()
        worst = max(worst, difference / scale)
    return worst
