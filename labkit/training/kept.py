"""Numbers that change while a run trains, beside parameters and the optimizer's state of them.

    groups     the optimizer's ``param_groups``: a learning rate, counters
    optimizer  attributes of the optimizer
    schedules  PyTorch's schedulers of this optimizer, wherever they are called
    loss       attributes of the loss, and its buffers
    data       attributes of the data set, and of data sets in it

A checkpoint has them by rank, as JSON. Attributes are kept if they are numbers, short lists of
numbers, or generators of random numbers.
"""

import gc
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

# A list of more numbers is taken for data.
_LONGEST = 64


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators, of ``random`` and of NumPy's global generator."""
    states = {"cpu": torch.get_rng_state()}
    states["python"] = _as_bytes(random.getstate())
    states["numpy"] = _as_bytes(np.random.get_state(legacy=False))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue from what ``random_states`` has returned, on a device of perhaps another kind."""
    torch.set_rng_state(states["cpu"])
    version, words, spare = _from_bytes(states["python"])
    random.setstate((version, tuple(words), spare))
    np.random.set_state(_from_bytes(states["numpy"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


class Kept:
    """The objects of a run whose numbers a checkpoint has, on one rank."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, loss: Any, dataset: Any):
        self.loss = loss
        losses = list(loss.modules()) if isinstance(loss, nn.Module) else [loss]
        self.kinds: dict[str, list[dict[str, Any]]] = {
            "groups": [],
            "optimizer": [],
            "schedules": [],
            "loss": _attributes(losses),
            "data": _attributes(_data_sets_in(dataset)),
        }
        if optimizer is not None:
            self.kinds["groups"] = optimizer.param_groups
            self.kinds["optimizer"] = [vars(optimizer)]
            # A scheduler knows its optimizer, and no optimizer knows its schedulers.
            for candidate in gc.get_objects():
                if issubclass(type(candidate), LRScheduler) and candidate.optimizer is optimizer:
                    self.kinds["schedules"].append(vars(candidate))
            self.kinds["schedules"].sort(key=lambda attributes: str(sorted(attributes)))

    def state(self) -> dict[str, Tensor]:
        """Return the numbers of all objects by kind, as the bytes of JSON, and loss buffers."""
        numbers = {}
        for kind, objects in self.kinds.items():
            numbers[kind] = [numbers_of(attributes) for attributes in objects]
        state = {"numbers": _as_bytes(numbers)}
        if isinstance(self.loss, nn.Module):
            state |= {f"loss/{name}": value for name, value in self.loss.state_dict().items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a ``state``, of this rank or, with other ranks, of any.

        Raises:
            ValueError: it is of other objects, such as an optimizer with other groups.
        """
        for kind, objects in _from_bytes(state["numbers"]).items():
            own_objects = self.kinds.get(kind, [])
            if own_objects and objects and len(own_objects) != len(objects):
                raise ValueError(
                    f"the checkpoint has {len(objects)} {kind} and there are {len(own_objects)} "
                    "here: resume with the settings and parts that it was written with"
                )
            for attributes, values in zip(own_objects, objects):
                for name, value in values.items():
                    _set(attributes, name, value)
        if isinstance(self.loss, nn.Module):
            names = self.loss.state_dict().keys()
            self.loss.load_state_dict({name: state[f"loss/{name}"] for name in names})


def common(states: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], list[str]]:
    """Return a state for other ranks than those that gave ``states``, and what these have differ.

    A rank may lack a kind, as one without an optimizer does.
    """
    numbers: dict[str, list[dict[str, Any]]] = {}
    differing: dict[str, None] = {}
    for state in states:
        for kind, objects in _from_bytes(state["numbers"]).items():
            if objects and numbers.setdefault(kind, objects) != objects:
                differing[kind] = None
        for name in state.keys() - {"numbers"}:
            if not torch.equal(state[name], states[0][name]):
                differing["loss"] = None
    return {**states[0], "numbers": _as_bytes(numbers)}, list(differing)


def _attributes(objects: Iterable[Any]) -> list[dict[str, Any]]:
    return [vars(value) for value in objects if hasattr(value, "__dict__")]


def _as_bytes(value: Any) -> Tensor:
    # NumPy's scalars and arrays become numbers and lists.
    text = json.dumps(value, default=lambda array: array.tolist())
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _from_bytes(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


def _data_sets_in(dataset: Any) -> list[Any]:
    """Return a data set, and those that it wraps, as a Subset does, each once."""
    data_sets = [dataset]
    for outer in data_sets:
        for value in getattr(outer, "__dict__", {}).values():
            values = value if isinstance(value, list) else [value]
            for inner in values:
                if isinstance(inner, Dataset) and all(inner is not known for known in data_sets):
                    data_sets.append(inner)
    return data_sets


def numbers_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that are kept: numbers, short lists of them, states of generators."""
    numbers: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, torch.Generator):
            numbers[name] = value.get_state().tolist()
        elif isinstance(value, random.Random):
            numbers[name] = value.getstate()
        elif isinstance(value, np.random.Generator):
            numbers[name] = value.bit_generator.state
        elif isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
            numbers[name] = value.item()
        else:
            is_list = type(value) in (list, tuple) and len(value) <= _LONGEST
            parts = value if is_list else [value]
            if all(isinstance(part, Real) for part in parts):
                numbers[name] = value
    return numbers


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    before = attributes.get(name)
    if isinstance(before, torch.Generator):
        before.set_state(torch.tensor(value, dtype=torch.uint8))
    elif isinstance(before, random.Random):
        version, words, spare = value
        before.setstate((version, tuple(words), spare))
    elif isinstance(before, np.random.Generator):
        before.bit_generator.state = value
    elif isinstance(before, Tensor):
        before.fill_(value)
    elif isinstance(before, list | tuple):
        attributes[name] = type(before)(value)
    elif isinstance(value, Real | list):
        # Some begin as None, or with the first step.
        attributes[name] = value
