"""Page 18: a port from Horovod to DDP, and the meaning of an update elsewhere.

The ranks of the port begin with different weights and buffers, as in a real program, and rank 0
alone may have a checkpoint. Symbols: P ranks.
"""

import copy
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler, TensorDataset

from labkit.engine.comm.comm import Comm
from workbook.exercises.grader import Case, Check, Wrong, judged
from workbook.exercises.grader.compare import plain, short

_FEATURES = 4
_CLASSES = 3
_LR = 0.1
_EPOCHS = 2
_BATCH_SIZE = 3


def _samples(case: Case) -> TensorDataset:
    """Shares of three batches, the last one shorter; the sampler gives one sample twice."""
    count = case.world_size * (3 * _BATCH_SIZE - 1) - 1
    return TensorDataset(case.random(0, count, _FEATURES).double(), torch.arange(count) % _CLASSES)


def _training(key: int, case: Case, factor: int) -> tuple[nn.Sequential, torch.optim.SGD]:
    """A model with a buffer, in float64, another one for each key, and its optimizer."""
    model = nn.Sequential(nn.Linear(_FEATURES, 5), nn.Tanh(), nn.Linear(5, _CLASSES)).double()
    model.register_buffer("centre", torch.zeros(_FEATURES).double())
    for number, tensor in enumerate(model.state_dict().values(), start=10 * key):
        tensor.copy_(case.random(number, *tensor.shape))
    return model, torch.optim.SGD(model.parameters(), lr=_LR * factor, momentum=0.9)


def _checkpoint(case: Case) -> dict[str, Any]:
    """A checkpoint of an earlier training, made anew: an optimizer goes on with its tensors."""
    model, optimizer = _training(10, case, case.world_size)
    for number, parameter in enumerate(model.parameters(), start=200):
        momentum = case.random(number, *parameter.shape).double()
        optimizer.state[parameter]["momentum_buffer"] = momentum
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The model's state and the momentum of its parameters, each in one row."""
    momentum = [optimizer.state[weight]["momentum_buffer"] for weight in model.parameters()]
    return [_flat(model.state_dict().values()), _flat(momentum)]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@lru_cache(maxsize=64)
def _by_rank(case: Case, mistake: str = "") -> list[list]:
    """The results of a port on each rank, as one device plays it, right or with a mistake."""
    samples = _samples(case)
    P = case.world_size
    factor = 1 if mistake == "not scaled" else P
    trainings = [_training(0, case, factor) for _ in range(P)]
    if case.size and mistake != "from the beginning":
        for rank, (model, optimizer) in enumerate(trainings):
            model.load_state_dict(_checkpoint(case)["model"])
            if mistake != "no momentum" and (rank == 0 or mistake != "momentum on rank 0"):
                optimizer.load_state_dict(_checkpoint(case)["optimizer"])
    losses = []
    samplers = [DistributedSampler(samples, P, rank) for rank in range(P)]
    for epoch in range(_EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(0 if mistake == "one order" else epoch)
        batch_losses = []
        for batches in zip(*(torch.tensor([*s]).split(_BATCH_SIZE) for s in samplers)):
            for (model, _), batch in zip(trainings, batches):
                inputs, targets = samples[batch]
                loss = functional.cross_entropy(model(inputs), targets)
                loss.backward()
                batch_losses.append(loss.item())
            for replicas in zip(*(model.parameters() for model, _ in trainings)):
                mean = torch.stack([weight.grad for weight in replicas]).mean(0)
                for weight in replicas if mistake != "not averaged" else ():
                    weight.grad = mean.clone()
            for _, optimizer in trainings:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(fmean(batch_losses[:: P if mistake == "own losses" else 1]))
    by_rank: list[list] = [[_left(*training)[0], losses, None, None] for training in trainings]
    by_rank[0][2:] = _left(*trainings[0])
    return by_rank


def _ported(fn: Callable, comm: Comm, case: Case) -> list | Wrong:
    model, _ = _training(comm.rank, case, 1)
    saved = []
    start = None
    if case.size and comm.rank == 0:
        start = _checkpoint(case)
    with ExitStack() as stack:
        # A run has its process group, so a script makes and destroys none; by their code, since
        # a script may have imported them by name.
        for function in map(inspect.unwrap, (dist.init_process_group, dist.destroy_process_group)):
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = (lambda *args, **options: None).__code__

        def save(state: Any) -> None:
            saved.append(copy.deepcopy(state))

        losses = fn(model, _samples(case), _BATCH_SIZE, _LR, _EPOCHS, start, save)
    if bool(saved) != (comm.rank == 0):
        article = "a" if saved else "no"
        return Wrong(f"it saves {article} checkpoint: rank 0 alone has to save one")
    state = _flat(model.state_dict().values())
    if not saved:
        return [state, losses, None, None]
    resumed_model, optimizer = _training(0, case, 1)
    try:
        resumed_model.load_state_dict(saved[-1]["model"])
        optimizer.load_state_dict(saved[-1]["optimizer"])
        return [state, losses, *_left(resumed_model, optimizer)]
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Wrong(f"training cannot go on from what it saves: {text:.200}")


# A port of ``programs.with_horovod.train`` to torch.distributed. Graded are the model's state, the
# mean losses, and the state and the momentum that rank 0 has saved.
to_ddp = Check(
    "elsewhere.to_ddp",
    lambda rank, case: _by_rank(case)[rank],
    inputs=lambda rank, case: (case,),
    signature="model, dataset, batch_size, lr, epochs, start, save",
    written=None,
    call=_ported,
    mistakes={
        "the learning rate is not multiplied by the number of ranks": (
            lambda rank, case: _by_rank(case, "not scaled")[rank]
        ),
        "each epoch has the same order: the sampler is not told the epoch": (
            lambda rank, case: _by_rank(case, "one order")[rank]
        ),
        "each rank updates with its own gradient: call the DDP, not the model that it wraps": (
            lambda rank, case: [_by_rank(case, "not averaged")[rank][0], None, None, None]
        ),
        "rank 0 returns the losses of its own share: they are a mean over the ranks": (
            lambda rank, case: _by_rank(case, "own losses")[rank]
        ),
        "training begins anew: start is not loaded": (
            lambda rank, case: _by_rank(case, "from the beginning")[rank]
        ),
        "the momentum of the checkpoint is not loaded": (
            lambda rank, case: _by_rank(case, "no momentum")[rank]
        ),
        "rank 0 alone has the momentum of the checkpoint, which DDP does not broadcast": (
            lambda rank, case: _by_rank(case, "momentum on rank 0")[rank]
        ),
    },
    sizes=(0, 1),
    nouns=("rank", ""),
    special=lambda case: "from a checkpoint" if case.size else "from the beginning",
)

# Conventions of an update: those of Horovod and DDP (the mean of the replicas' means, or with
# ``op=Sum`` their sum; statistics of the rank's own, or of rank 0), of TensorFlow's strategies
# (a mean over the batch; the mean of the replicas' statistics), and of SyncBatchNorm.
GRADIENTS = ("mean of means", "mean over the batch", "sum of means")
STATISTICS = ("own", "rank 0", "mean of replicas", "whole batch")
# P shares -> how far the weight has moved, and the running mean on each replica.
Step = Callable[[Sequence[Sequence[float]]], tuple[float, list[float]]]


@judged("step", *itertools.product(GRADIENTS, STATISTICS))
def semantics(fn: Callable, gradients: str, statistics: str) -> Wrong | None:
    """Grade ``fn(step)``: (what becomes of the gradients, whose batch statistics are kept).

    ``step(shares)`` makes one update on ``len(shares)`` replicas, from the same start each time;
    a share is a list of samples, numbers, each of which is its own gradient. It returns how far
    the weight has moved, and each replica's running mean.
    """
    lr = random.uniform(0.1, 0.9)
    momentum = random.uniform(0.1, 0.9)
    answer = plain(fn(step_of(gradients, statistics, lr, momentum)))
    if isinstance(answer, list):
        answer = [" ".join(x.lower().split()) if isinstance(x, str) else x for x in answer]
    if answer == [gradients, statistics]:
        return None
    return Wrong(f"it returned {short(answer)}")


def step_of(gradients: str, statistics: str, lr: float = 1.0, momentum: float = 1.0) -> Step:
    """One update, always from the same start: a weight and a running mean of 0."""

    def step(shares: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
        numbers = [[float(sample) for sample in share] for share in shares]
        means = [fmean(share) for share in numbers]
        batch_mean = fmean(itertools.chain(*numbers))
        moved = dict(zip(GRADIENTS, (fmean(means), batch_mean, sum(means))))
        by_replica = means
        if statistics != "own":
            common = dict(zip(STATISTICS[1:], (means[0], fmean(means), batch_mean)))
            by_replica = [common[statistics]] * len(means)
        return lr * moved[gradients], [momentum * mean for mean in by_replica]

    return step
