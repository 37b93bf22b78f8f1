"""The training that ``check.elsewhere`` asks for, and what is wrong with one that has run.

All ranks are played here, one after another, in float64: the right training, and those with a
mistake. Symbols: P ranks, N samples.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DistributedSampler, TensorDataset

from workbook.exercises.grader import Case
from workbook.exercises.grader.compare import short
from workbook.exercises.grader.exercise import Found

_FEATURES, _HIDDEN, _CLASSES = 4, 5, 3
# A gradient is never as long as the first of these, and always longer than the second.
_NOT_CLIPPED, _CLIPPED = 1000.0, 0.02
State = dict[str, Tensor]


class Setting:
    """One training; the seed of ``case`` makes all data.

    Attributes:
        resumed: whether it starts from a checkpoint.
        passes: the batches of an update; with two of them, gradients are clipped.
        batch_size: of a rank; its last batch is one sample shorter.
        samples: N of (inputs [4], target); the first feature tells which sample it is. One less
            than all shares together, so that the sampler gives one of them twice.
    """

    def __init__(self, case: Case, resumed: bool, passes: int = 1):
        self.case, self.resumed, self.passes = case, resumed, passes
        self._key = 1000 * (1 + resumed)
        self.batch_size = case.integer(self._key + 1, 2, 4)
        self.epochs = case.integer(self._key + 2, 2, 3)
        self.lr = case.integer(self._key + 3, 5, 15) / 100
        self.max_norm = _CLIPPED if resumed else _NOT_CLIPPED
        share = self.batch_size * (3 if passes == 1 else 4) - 1
        count = case.world_size * share - (case.world_size > 1)
        inputs = self._random(4, count, _FEATURES)
        self.samples = TensorDataset(inputs, torch.arange(count) % _CLASSES)

    def model(self, rank: int) -> nn.Sequential:
        """The model as ``rank`` makes it, in float64, with a buffer: another one on every rank."""
        linear = nn.Linear(_FEATURES, _HIDDEN), nn.Linear(_HIDDEN, _CLASSES)
        layers = nn.Sequential(linear[0], nn.Tanh(), linear[1]).double()
        layers.register_buffer("centre", torch.zeros(_FEATURES).double())
        layers.load_state_dict(self._state(layers, 10 + 10 * rank))
        return layers

    def checkpoint(self) -> dict[str, Any] | None:
        """{"model": ..., "optimizer": ...} of an earlier training; None without one."""
        if not self.resumed:
            return None
        model = self.model(0)
        optimizer = self.optimizer(model, self.case.world_size)
        for number, parameter in enumerate(model.parameters()):
            momentum = self._random(200 + number, *parameter.shape)
            optimizer.state[parameter]["momentum_buffer"] = momentum
        return {"model": self._state(model, 100), "optimizer": optimizer.state_dict()}

    def optimizer(self, model: nn.Module, factor: int) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=self.lr * factor, momentum=0.9)

    def batches(self, rank: int, epoch: int) -> list[list[int]]:
        """The samples' numbers, by batch."""
        sampler = DistributedSampler(self.samples, self.case.world_size, rank)
        sampler.set_epoch(epoch)
        rows = list(sampler)
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def _state(self, model: nn.Module, first_key: int) -> State:
        named = enumerate(model.state_dict().items(), start=first_key)
        return {name: self._random(key, *value.shape) for key, (name, value) in named}

    def _random(self, key: int, *shape: int) -> Tensor:
        return self.case.random(self._key + key, *shape).double()


class Trained(NamedTuple):
    """What a training has left on a rank.

    Attributes:
        state: of the model.
        losses: what the function returned.
        saved: what it has saved, in this order.
    """

    state: State
    losses: Any
    saved: list[dict[str, Any]]


# What a port may miss -> the name of the mistake in ``played``.
MISTAKES = {
    "the learning rate is not multiplied by the number of ranks": "not scaled",
    "the ranks begin with models of their own: they have to begin with rank 0's": "own models",
    "each rank updates with its own gradient, so the replicas drift apart": "not averaged",
}


@lru_cache(maxsize=64)
def played(setting: Setting, mistake: str = "") -> list[Trained]:
    """The training by rank, as one device plays it: right, or with one of the ``MISTAKES``."""
    P = setting.case.world_size
    models = [setting.model(rank) for rank in range(P)]
    factor = 1 if mistake == "not scaled" else P
    optimizers = [setting.optimizer(model, factor) for model in models]
    for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
        # Anew, since an optimizer goes on with the tensors that it loads.
        found = setting.checkpoint()
        if rank == 0 or mistake != "own models":
            model.load_state_dict(found["model"] if found else setting.model(0).state_dict())
        if found:
            optimizer.load_state_dict(found["optimizer"])
    losses = [0.0] * setting.epochs
    for epoch in range(setting.epochs):
        by_rank = [setting.batches(rank, epoch) for rank in range(P)]
        for number, batches in enumerate(zip(*by_rank), start=1):
            for model, rows in zip(models, batches):
                inputs, targets = setting.samples[rows]
                loss = functional.cross_entropy(model(inputs), targets)
                (loss / setting.passes).backward()
                losses[epoch] += loss.item() / len(by_rank[0]) / P
            if number % setting.passes:
                continue
            if mistake != "not averaged":
                for replicas in zip(*(model.parameters() for model in models)):
                    mean = torch.stack([parameter.grad for parameter in replicas]).mean(0)
                    for parameter in replicas:
                        parameter.grad = mean.clone()
            for model, optimizer in zip(models, optimizers):
                if setting.passes > 1:
                    clip_grad_norm_(model.parameters(), setting.max_norm)
                optimizer.step()
                optimizer.zero_grad()
    saved = [
        {"model": m.state_dict(), "optimizer": o.state_dict()} for m, o in zip(models, optimizers)
    ]
    return [Trained(one["model"], losses, [one]) for one in saved]


def momentum_of(state: dict[str, Any]) -> list[Tensor]:
    """What an optimizer's state holds for each parameter, a zero where it holds nothing."""
    found = [state["state"].get(i) for i in state["param_groups"][0]["params"]]
    return [one["momentum_buffer"].clone() if one else torch.zeros(()) for one in found]


# By training, then by rank.
Trainings = Sequence[tuple[Setting, Sequence[Trained]]]


def wrong_training(trainings: Trainings) -> Found:
    """The first thing that is wrong, or the one of the ``MISTAKES`` that explains it."""
    everyone = [(s, rank, one) for s, ranks in trainings for rank, one in enumerate(ranks)]
    for setting, rank, one in everyone:
        start = "from a checkpoint" if setting.resumed else "from the beginning"
        place, right = f"{start}, rank {rank}: ", played(setting)[rank]
        if found := differs("the model's state", one.state, right.state):
            for sentence, name in MISTAKES.items():
                pairs = ((one, played(s, name)[rank]) for s, rank, one in everyone)
                if not any(differs("", own.state, made.state) for own, made in pairs):
                    return sentence
            return place + found
        # The loss of an epoch travels in float32.
        if found := differs("the mean loss of all ranks", one.losses, right.losses, 1e-5, 0.0):
            return place + found
    for setting, ranks in trainings:
        for rank, one in enumerate(ranks):
            if differs("", one.state, ranks[0].state, 0.0, 0.0):
                return f"ranks 0 and {rank} differ in the last bits, so replicas drift apart"
        savers = [rank for rank, one in enumerate(ranks) if one.saved]
        if savers != [0]:
            return f"the checkpoint is saved by the ranks {savers}, expected rank 0 alone"
        saved, right = ranks[0].saved[-1], played(setting)[0].saved[0]
        try:
            kept = saved["model"], momentum_of(saved["optimizer"])
        except (KeyError, TypeError, IndexError, AttributeError):
            return f"what is saved is {short(saved)}, expected the states of model and optimizer"
        if found := differs(
            "what is saved", kept, (right["model"], momentum_of(right["optimizer"]))
        ):
            return f"{found} (item 0: the model, 1: the momentum)"
    return None


def differs(
    what: str, found: Any, expected: Any, relative: float = 1e-8, absolute: float = 1e-10
) -> Found:
    """The first difference between two numbers, tensors, or lists or dicts of them."""
    try:
        torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)
    except (AssertionError, TypeError) as error:
        return f"{what} is not the expected one: {' '.join(str(error).split())}"
    return None
