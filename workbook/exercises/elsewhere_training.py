"""The training that ``check.elsewhere`` judges, and what a mistake makes of it.

All ranks are played here, one after another, in float64: the right training, and those with a
deviation. Symbols: P ranks, N samples.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset, DistributedSampler

from workbook.exercises.grader import Case

_FEATURES, _HIDDEN, _CLASSES = 4, 5, 3
_MOMENTUM = 0.9
# A gradient is never as long as the first of these, and always longer than the second.
_NOT_CLIPPED, _CLIPPED = 1000.0, 0.02
State = dict[str, Tensor]
Batches = list[list[list[int]]]


class Centre(nn.Module):
    """Subtracts a buffer, [4], from samples [n, 4]: part of a model's state, and no parameter."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(_FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - self.centre


class Samples(Dataset):
    """N samples: (inputs [4], target) each. The first feature tells which sample it is."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        case: the call of the learner's function; its seed makes all data.
        resumed: whether it starts from a checkpoint.
        passes: the batches of an update.
        clips: whether gradients are clipped.
    """

    case: Case
    resumed: bool
    passes: int = 1
    clips: bool = False

    @property
    def ranks(self) -> range:
        return range(self.case.world_size)

    @property
    def batch_size(self) -> int:
        """Of a rank; its last batch is one sample shorter."""
        return self.case.integer(self._key(1), 2, 4)

    @property
    def share(self) -> int:
        """The samples of a rank in an epoch."""
        return self.batch_size * (3 if self.passes == 1 else 4) - 1

    @property
    def epochs(self) -> int:
        return self.case.integer(self._key(2), 2, 3)

    @property
    def lr(self) -> float:
        return self.case.integer(self._key(3), 5, 15) / 100

    @property
    def max_norm(self) -> float:
        return _CLIPPED if self.resumed else _NOT_CLIPPED

    @cached_property
    def samples(self) -> Samples:
        """One sample less than all shares together: the sampler gives one of them twice."""
        count = self.case.world_size * self.share - (self.case.world_size > 1)
        targets = torch.arange(count) % _CLASSES
        return Samples(self._random(4, count, _FEATURES), targets)

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

    def batches(self, **sampling: Any) -> list[Batches]:
        """By rank, epoch and batch: the samples' numbers."""
        epochs = range(self.epochs)
        return [[self._of_epoch(rank, e, sampling) for e in epochs] for rank in self.ranks]

    def _of_epoch(self, rank: int, epoch: int, sampling: dict[str, Any]) -> list[list[int]]:
        sampler = DistributedSampler(self.samples, self.case.world_size, rank, **sampling)
        sampler.set_epoch(epoch)
        rows = list(sampler)
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def _state(self, model: nn.Module, first_key: int) -> State:
        named = enumerate(model.state_dict().items(), start=first_key)
        return {name: self._random(key, *value.shape) for key, (name, value) in named}

    def _random(self, key: int, *shape: int) -> Tensor:
        return self.case.random(self._key(key), *shape).double()

    def _key(self, key: int) -> int:
        return key + 1000 * (1 + self.resumed)


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


@lru_cache(maxsize=1024)
def played(setting: Setting, ways: Ways = RIGHT) -> list[Replica]:
    """The training on one device that plays all ranks, by rank."""
    # Tensors of a few numbers: further threads would only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _played(setting, ways)
    finally:
        torch.set_num_threads(threads)


def _played(setting: Setting, ways: Ways) -> list[Replica]:
    replicas = [_begin(setting, ways, rank) for rank in setting.ranks]
    losses: list[list[float]] = [[] for _ in replicas]
    for of_ranks in zip(*setting.batches()):
        sums = [0.0 for _ in replicas]
        for number, rows in enumerate(zip(*of_ranks), start=1):
            for rank, (model, _) in enumerate(replicas):
                loss = _loss(setting, model, rows[rank])
                (loss / setting.passes).backward()
                sums[rank] += loss.item()
            if number % setting.passes == 0:
                _update(setting, ways, replicas)
        for own, total in zip(losses, sums):
            own.append(total / number)
    return [
        Replica(_copied(model.state_dict()), momentum_of(optimizer.state_dict()), own)
        for (model, optimizer), own in zip(replicas, losses)
    ]


def _begin(setting: Setting, ways: Ways, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, found = setting.model(rank), setting.checkpoint()
    optimizer = setting.optimizer(model, setting.case.world_size**ways.power)
    if rank == 0 or ways.shared:
        model.load_state_dict(found["model"] if found else setting.model(0).state_dict())
    if found:
        optimizer.load_state_dict(found["optimizer"])
    return model, optimizer


def _loss(setting: Setting, model: nn.Module, rows: list[int]) -> Tensor:
    samples = setting.samples
    return functional.cross_entropy(model(samples.inputs[rows]), samples.targets[rows])


def _update(setting: Setting, ways: Ways, replicas: list) -> None:
    by_rank = [list(model.parameters()) for model, _ in replicas]
    for when in ("before", "after"):
        if setting.clips and ways.clip == when:
            for parameters in by_rank:
                clip_grad_norm_(parameters, setting.max_norm)
        if when == "before" and ways.averaged:
            for of_ranks in zip(*by_rank):
                mean = torch.stack([parameter.grad for parameter in of_ranks]).mean(0)
                for parameter in of_ranks:
                    parameter.grad = mean.clone()
    for _, optimizer in replicas:
        optimizer.step()
        optimizer.zero_grad()


def _copied(state: State) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


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
