"""What a technique gives to a checkpoint, and takes from one.

In a checkpoint, everything that belongs to the model has the model's own names and shapes: its
parameters, its buffers, and the optimizer's state of each parameter. So it does not matter which
rank held what, and a run may continue on another number of ranks. What only one rank has (batch
statistics of its share, values that it has not sent yet) is kept by rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm

# By parameter, the tensors that an optimizer keeps of it.
State = dict[str, dict[str, Tensor]]
# Numbers in an optimizer's state travel as tensors, under names that begin with this.
_NUMBER = "number:"


class Kept:
    """The part of a run's state that one rank holds, with the model's own names.

    All tensors are those of the run itself: whoever keeps them copies them first.

    Args:
        state: parameters and buffers here, by their names in the model's state dict.
        parameters: the model's parameters here, each once, as ``named_parameters`` names them.
        optimizer: of these parameters; None on a rank that makes no updates.

    Attributes:
        given: the part of ``state`` that this rank gives to a checkpoint; all of it unless it is
            set. Ranks that give the same name have the same bits.
        buffers: the buffers of which each rank has its own values, also those that are in no
            state dict.
        own: what else this rank alone carries from step to step.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
    ):
        self.state, self.parameters = dict(state), dict(parameters)
        self.optimizer = optimizer
        self.given = self.state
        self.buffers: dict[str, Tensor] = {}
        self.own: dict[str, Tensor] = {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers, by their names in the model's state dict."""
        copy_into(self.state, state)

    def optimizer_state(self) -> State:
        """The optimizer's state of each parameter here; a collective call."""
        if self.optimizer is None:
            return {}
        return {
            name: _as_tensors(name, self.optimizer.state[parameter])
            for name, parameter in self.parameters.items()
            if self.optimizer.state.get(parameter)
        }

    def load_optimizer_state(self, state: State) -> None:
        """Give the optimizer the state that it had of each parameter."""
        for name, parameter in self.parameters.items():
            if self.optimizer is not None and name in state:
                self._set_state(parameter, state[name])

    def rates(self) -> Tensor | None:
        """The floats in the optimizer's groups, such as lr and betas, end to end."""
        if self.optimizer is None:
            return None
        found = [value for *_, values in _rates(self.optimizer) for value in values]
        return torch.tensor(found, dtype=torch.float64)

    def load_rates(self, rates: Tensor | None) -> None:
        """Set the floats in the optimizer's groups as they were."""
        if self.optimizer is None or rates is None:
            return
        left = iter(rates.tolist())
        for group, name, values in list(_rates(self.optimizer)):
            new = [next(left) for _ in values]
            if isinstance(group[name], Tensor):
                group[name].fill_(new[0])
            else:
                group[name] = tuple(new) if isinstance(group[name], tuple) else new[0]

    def _set_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        assert self.optimizer is not None
        device, rule = parameter.device, self.optimizer.defaults
        # PyTorch's optimizers count steps on the host, but for those that run as one kernel.
        counts_there = bool(rule.get("capturable") or rule.get("fused"))
        here = {
            key: value.to(device if counts_there or key != "step" else "cpu", copy=True)
            for key, value in state.items()
        }
        numbers = {key for key in here if key.startswith(_NUMBER)}
        self.optimizer.state[parameter] = {
            key.removeprefix(_NUMBER): value.item() if key in numbers else value
            for key, value in here.items()
        }

    def state_of(self) -> list[str]:
        """The parameters whose state the optimizer here needs."""
        return list(self.parameters) if self.optimizer is not None else []


class KeptElements(Kept):
    """As ``Kept``, if optimizers have slices of all trained parameters laid end to end, [N].

    Args:
        kept: what this rank holds otherwise.
        comm: this rank's Comm.
        slices: (start, end) of each server's slice; server k is rank k.
    """

    def __init__(self, kept: Kept, comm: Comm, slices: list[tuple[int, int]]):
        trained = {name: p for name, p in kept.parameters.items() if p.requires_grad}
        super().__init__(kept.state, trained, kept.optimizer)
        self.given, self.buffers, self.own = kept.given, kept.buffers, kept.own
        self.comm, self.slices = comm, slices

    def optimizer_state(self) -> State:
        """Rank 0 gets the slices of the other servers, so that each parameter is whole."""
        mine: dict[str, Tensor] = {}
        if self.optimizer is not None:
            (flat,) = self._flat()
            mine = _as_tensors("the parameters", self.optimizer.state[flat])
        whole = {key: self._gathered(value) for key, value in mine.items()}
        return _cut(whole, self.parameters) if self.comm.rank == 0 else {}

    def load_optimizer_state(self, state: State) -> None:
        if self.optimizer is None or not state:
            return
        (flat,) = self._flat()
        start, end = self.slices[self.comm.rank]
        whole = _joined(state, self.parameters)
        mine = {key: v[start:end].clone() if v.dim() else v for key, v in whole.items()}
        self._set_state(flat, mine)

    def _flat(self) -> list[Tensor]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _gathered(self, value: Tensor) -> Tensor:
        """On rank 0, what all servers have of ``value``; a number is the same on all of them."""
        if not value.dim() or len(self.slices) == 1:
            return value
        if self.comm.rank:
            self.comm.send(value.to(self.comm.device), 0)
            return value
        rest = [value.new_empty(end - start) for start, end in self.slices[1:]]
        received = [self.comm.recv(part, rank) for rank, part in enumerate(rest, start=1)]
        return torch.cat([value, *received])


def kept_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    is_current: bool = True,
    is_first: bool = True,
) -> Kept:
    """What a rank with the whole model holds.

    Args:
        model: on this rank.
        optimizer: of its parameters; None if there is none here.
        is_current: whether the parameters here are always up to date, and the buffers count.
        is_first: whether the checkpoint's model has the buffers of this rank.
    """
    state = {k: v.detach() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    kept = Kept(state, dict(model.named_parameters()), optimizer)
    if not (is_current and is_first):
        kept.given = dict(kept.parameters) if is_current else {}
    kept.buffers = dict(model.named_buffers()) if is_current else {}
    return kept


def _rates(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[dict[str, Any], str, Sequence[float]]]:
    """The groups' names whose values are floats, or tuples of them; in one order always."""
    for group in optimizer.param_groups:
        for name in sorted(group.keys() - {"params"}):
            value = group[name]
            if isinstance(value, Tensor) and value.numel() == 1:
                yield group, name, [value.item()]
            elif isinstance(value, float):
                yield group, name, [value]
            elif isinstance(value, tuple) and all(isinstance(one, float) for one in value):
                yield group, name, value


@torch.no_grad()
def copy_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Set each of the ``tensors`` to the value of the same name."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _as_tensors(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """An optimizer's state of one parameter, its numbers as tensors; None is left out.

    Raises:
        ValueError: it keeps something else.
    """
    found = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found[key] = value
        elif isinstance(value, (bool, int, float)):
            kind = torch.float64 if isinstance(value, float) else None
            found[_NUMBER + key] = torch.tensor(value, dtype=kind)
        elif value is not None:
            raise ValueError(
                f"the optimizer keeps {key} of {name} as a {type(value).__name__}, and a "
                "checkpoint holds tensors and numbers: use another optimizer, such as SGD or "
                "Adam, or leave checkpoint_dir out"
            )
    return found


def _cut(whole: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> State:
    """The state of a flat parameter [N] as that of the parameters of which it consists."""
    state: State = {name: {} for name in parameters}
    sizes = [parameter.numel() for parameter in parameters.values()]
    for key, value in whole.items():
        parts = value.split(sizes) if value.dim() else [value] * len(sizes)
        for (name, parameter), part in zip(parameters.items(), parts):
            state[name][key] = part.view(parameter.shape) if value.dim() else part
    return state


def _joined(state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of ``_cut``."""
    by_name = [(state[name], parameter) for name, parameter in parameters.items()]
    joined = {}
    for key, first in by_name[0][0].items():
        # A parameter may have no dimensions either, but then it is not the only one, or flat.
        is_number = key.startswith(_NUMBER) or first.shape != by_name[0][1].shape or key == "step"
        joined[key] = first if is_number else torch.cat([one[key].flatten() for one, _ in by_name])
    return joined
