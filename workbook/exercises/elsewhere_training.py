"""The training that ``check.elsewhere`` judges, and what is wrong with one that it has run.

All ranks are played here, one after another, in float64: the right training, and those with a
deviation. Symbols: P ranks, N samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_MOMENTUM = 0.9
# A gradient is never as long as the first of these, and always longer than the second.
_NOT_CLIPPED, _CLIPPED = 1000.0, 0.02
# The loss of an epoch travels in float32.
_CLOSE = 1e-5
State = dict[str, Tensor]


class Centre(nn.Module):
    """Subtracts a buffer, [4], from samples [n, 4]: part of a model's state, and no parameter."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(_FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - self.centre


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
        """The model as ``rank`` makes it, in float64: another one on every rank."""
        linear = nn.Linear(_FEATURES, _HIDDEN), nn.Linear(_HIDDEN, _CLASSES)
        layers = nn.Sequential(Centre(), linear[0], nn.Tanh(), linear[1]).double()
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
        return torch.optim.SGD(model.parameters(), lr=self.lr * factor, momentum=_MOMENTUM)

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


class Ways(NamedTuple):
    """How a training goes; by default as it should.

    Attributes:
        shared: whether all ranks begin with the state of rank 0, and not with their own.
        power: of P, by which the learning rate is scaled.
        averaged: whether the gradients are averaged over the ranks.
        clip: the gradient "after" the exchange, or the rank's own "before" it.
    """

    shared: bool = True
    power: int = 1
    averaged: bool = True
    clip: str = "after"


RIGHT = Ways()


class Replica(NamedTuple):
    """A rank's model at the end, what its optimizer holds, its own mean loss by epoch."""

    state: State
    momentum: list[Tensor]
    losses: list[float]


@lru_cache(maxsize=64)
def played(setting: Setting, ways: Ways = RIGHT) -> list[Replica]:
    """The training on one device that plays all ranks, by rank."""
    P = setting.case.world_size
    models = [setting.model(rank) for rank in range(P)]
    optimizers = [setting.optimizer(model, P**ways.power) for model in models]
    for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
        # Anew, since an optimizer goes on with the tensors that it loads.
        found = setting.checkpoint()
        if rank == 0 or ways.shared:
            model.load_state_dict(found["model"] if found else setting.model(0).state_dict())
        if found:
            optimizer.load_state_dict(found["optimizer"])
    losses: list[list[float]] = [[] for _ in models]
    for epoch in range(setting.epochs):
        by_rank = [setting.batches(rank, epoch) for rank in range(P)]
        for rank in range(P):
            losses[rank].append(0.0)
        for number, of_ranks in enumerate(zip(*by_rank), start=1):
            for rank, rows in enumerate(of_ranks):
                inputs, targets = setting.samples[rows]
                loss = functional.cross_entropy(models[rank](inputs), targets)
                (loss / setting.passes).backward()
                losses[rank][-1] += loss.item() / len(by_rank[rank])
            if number % setting.passes == 0:
                _update(setting, ways, models, optimizers)
    parts = zip(models, optimizers, losses)
    return [Replica(m.state_dict(), momentum_of(o.state_dict()), own) for m, o, own in parts]


def _update(setting: Setting, ways: Ways, models: list, optimizers: list) -> None:
    for when in ("before", "after"):
        if setting.passes > 1 and ways.clip == when:
            for model in models:
                clip_grad_norm_(model.parameters(), setting.max_norm)
        if when == "before" and ways.averaged:
            for of_ranks in zip(*(model.parameters() for model in models)):
                mean = torch.stack([parameter.grad for parameter in of_ranks]).mean(0)
                for parameter in of_ranks:
                    parameter.grad = mean.clone()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def momentum_of(state: dict[str, Any]) -> list[Tensor]:
    """What an optimizer's state holds for each parameter, a zero where it holds nothing."""
    found = [state["state"].get(i) for i in state["param_groups"][0]["params"]]
    return [one["momentum_buffer"].clone() if one else torch.zeros(()) for one in found]


def alike(one: State, other: State) -> bool:
    """Whether two states have the same names and, up to rounding in float64, values."""
    return one.keys() == other.keys() and all(
        one[name].shape == value.shape and torch.allclose(one[name], value, rtol=1e-8, atol=1e-10)
        for name, value in other.items()
    )


@dataclass(frozen=True)
class Trained:
    """What a training has left on a rank. (No tuple: a check makes lists of those.)

    Attributes:
        state: of the model.
        losses: what the function returned.
        saved: what it has saved, in this order.
        seen: the samples of each forward with gradients; -1 for one that is not of the data set.
    """

    state: State
    losses: Any
    saved: list[dict[str, Any]]
    seen: list[list[int]]


# By training, then by rank.
Trainings = Sequence[tuple[Setting, Sequence[Trained]]]


def wrong_training(trainings: Trainings, mistakes: Mapping[str, Ways]) -> Found:
    """The first thing that is wrong. ``mistakes``: a sentence -> how such a training goes."""
    everyone = [(s, rank, one) for s, ranks in trainings for rank, one in enumerate(ranks)]
    for setting, rank, one in everyone:
        found = one.losses if isinstance(one.losses, list) else []
        if [type(x) for x in found] != [float] * setting.epochs:
            text = f"rank {rank} returned {short(one.losses)}: return a list of numbers, the mean "
            return f"{text}loss of each of the {setting.epochs} epochs"
    if len(trainings[0][1]) > 1 and all(
        _all_samples(setting, one) for setting, _, one in everyone
    ):
        return "every rank trains on all samples in every epoch, not on its share of them"
    if found := _wrong_state(everyone, mistakes):
        return found
    for setting, ranks in trainings:
        own = [replica.losses for replica in played(setting)]
        expected = [sum(losses) / len(losses) for losses in zip(*own)]
        for rank, one in enumerate(ranks):
            if not all(abs(x - y) <= _CLOSE * abs(y) for x, y in zip(one.losses, expected)):
                text = f"the model is right, but rank {rank} returned {short(one.losses)}"
                return f"{text}, expected the losses averaged over the ranks, {short(expected)}"
        savers = [rank for rank, one in enumerate(ranks) if one.saved]
        if savers != [0]:
            text = f"the checkpoint is saved by the ranks {savers}, expected rank 0 alone"
            return f"{text}: on one disk they would write the same file at the same time"
        if found := _wrong_checkpoint(setting, ranks[0]):
            return found
    return None


def _all_samples(setting: Setting, one: Trained) -> bool:
    """Whether a rank has trained on all samples in each epoch: wrong with any result."""
    rows = [row for rows in one.seen for row in rows]
    length = len(rows) // setting.epochs
    epochs = [{*rows[e * length : (e + 1) * length]} for e in range(setting.epochs)]
    return epochs == [{*range(len(setting.samples))}] * setting.epochs


def _wrong_state(
    everyone: Sequence[tuple[Setting, int, Trained]], mistakes: Mapping[str, Ways]
) -> Found:
    for setting, rank, one in everyone:
        due = played(setting)[rank].state
        if not alike(one.state, due):
            for sentence, ways in mistakes.items():
                if all(alike(one.state, played(s, ways)[rank].state) for s, rank, one in everyone):
                    return sentence
            name = next(n for n in due if not alike({n: one.state[n]}, {n: due[n]}))
            start = "from a checkpoint" if setting.resumed else "from the beginning"
            found, wanted = (float(state[name].flatten()[0]) for state in (one.state, due))
            text = f"{start}, rank {rank} ends with {name} = {found:.6g}, ..., and one device "
            text += f"that plays all ranks with {wanted:.6g}, ...; its largest batch has "
            most = max(map(len, one.seen), default=0)
            return f"{text}{most} samples, and that of the script {setting.batch_size}"
    firsts = {setting: one for setting, rank, one in everyone if rank == 0}
    for setting, rank, one in everyone:
        if any(not one.state[n].equal(value) for n, value in firsts[setting].state.items()):
            return f"ranks 0 and {rank} differ in the last bits, so replicas drift apart"
    return None


def _wrong_checkpoint(setting: Setting, one: Trained) -> Found:
    saved = one.saved[-1]
    if not isinstance(saved, dict) or not {"model", "optimizer"} <= saved.keys():
        return f"what is saved is {short(saved)}, expected {{'model': ..., 'optimizer': ...}}"
    if not alike(saved["model"], one.state):
        names = list(saved["model"])[:1]
        return f"what is saved as the model (with names like {names}) is not the model at the end"
    try:
        found = momentum_of(saved["optimizer"])
    except (KeyError, TypeError, IndexError, AttributeError):
        found = []
    both = found, played(setting)[0].momentum
    if not alike(*({str(i): x for i, x in enumerate(one)} for one in both)):
        return "what is saved as the optimizer does not hold the momentum at the end"
    return None
