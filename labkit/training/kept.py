"""Numbers that change while a run trains, beside parameters and the optimizer's state of them.

    random     the states of Python's and NumPy's generators
    groups     the optimizer's ``param_groups``: a learning rate, counters
    schedules  PyTorch's schedulers of this optimizer, wherever they are called
    loss       attributes of the loss, and its buffers
    data       attributes of the data set

A checkpoint has them by rank. Attributes are kept if they are numbers or short lists of numbers.
"""

import gc
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

# A list of more numbers is taken for data.
_LONGEST = 64


def python_random() -> dict[str, Tensor]:
    """Return the states of ``random`` and of NumPy's global generator, float64."""
    _, words, spare = random.getstate()  # type: ignore[misc]
    _, keys, position, has_spare, numpy_spare = np.random.get_state(legacy=True)
    # All words are below 2^32, and exact as float64; infinity stands for no spare number.
    python = [*words, math.inf if spare is None else spare]
    numpy = [*map(int, keys), position, has_spare, numpy_spare]
    return {
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor(numpy, dtype=torch.float64),
    }


def set_python_random(states: Mapping[str, Tensor]) -> None:
    """Continue from what ``python_random`` has returned."""
    *words, spare = states["python"].tolist()
    random.setstate((3, tuple(map(int, words)), None if math.isinf(spare) else spare))
    *keys, position, has_spare, numpy_spare = states["numpy"].tolist()
    words = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_spare), numpy_spare))


class Kept:
    """The objects of a run whose numbers a checkpoint has, on one rank."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, loss: Any, dataset: Any):
        self.loss = loss
        self.kinds: dict[str, list[dict[str, Any]]] = {"groups": [], "schedules": []}
        if optimizer is not None:
            self.kinds["groups"] = getattr(optimizer, "param_groups", [])
            # A scheduler knows its optimizer, and no optimizer knows its schedulers.
            for candidate in gc.get_objects():
                if issubclass(type(candidate), LRScheduler) and candidate.optimizer is optimizer:
                    self.kinds["schedules"].append(vars(candidate))
            self.kinds["schedules"].sort(key=lambda attributes: str(sorted(attributes)))
        parts = list(loss.modules()) if isinstance(loss, nn.Module) else [loss]
        self.kinds["loss"] = [part.__dict__ for part in parts if hasattr(part, "__dict__")]
        self.kinds["data"] = [dataset.__dict__] if hasattr(dataset, "__dict__") else []

    def numbers(self) -> dict[str, list[dict[str, Any]]]:
        """By kind and object the attributes that are numbers, as JSON has them."""
        found: dict[str, list[dict[str, Any]]] = {}
        for kind, objects in self.kinds.items():
            found[kind] = [_numbers_of(attributes) for attributes in objects]
        return found

    def state(self) -> dict[str, Tensor]:
        """Return the numbers as the bytes of a JSON text, and the loss's buffers."""
        state = {"numbers": _as_bytes(self.numbers())}
        if isinstance(self.loss, nn.Module):
            state |= {f"loss/{name}": value for name, value in self.loss.state_dict().items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a ``state``, of this rank or, with other ranks, of any.

        Raises:
            ValueError: it is of other objects, such as an optimizer with other groups.
        """
        for kind, objects in numbers_in(state).items():
            ours = self.kinds.get(kind, [])
            if ours and objects and len(ours) != len(objects):
                raise ValueError(
                    f"the checkpoint has {len(objects)} {kind} and there are {len(ours)} here: "
                    "resume with the settings and parts that it was written with"
                )
            for attributes, values in zip(ours, objects):
                for name in values.keys() & _numbers_of(attributes).keys():
                    _set(attributes, name, values[name])
        if isinstance(self.loss, nn.Module):
            names = self.loss.state_dict().keys()
            self.loss.load_state_dict({name: state[f"loss/{name}"] for name in names})


def numbers_in(state: Mapping[str, Tensor]) -> dict[str, list[dict[str, Any]]]:
    """Return the numbers that a ``state`` has, by kind and object."""
    return json.loads(bytes(state["numbers"].tolist()))


def common(states: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], list[str]]:
    """Return a state for other ranks than those that gave ``states``, and what these have differ.

    A rank may lack a kind, as one without an optimizer does.
    """
    numbers: dict[str, list[dict[str, Any]]] = {}
    differing: dict[str, None] = {}
    for state in states:
        for kind, objects in numbers_in(state).items():
            if objects and numbers.setdefault(kind, objects) != objects:
                differing[kind] = None
        for name in state.keys() - {"numbers"}:
            if not torch.equal(state[name], states[0][name]):
                differing["loss"] = None
    return {**states[0], "numbers": _as_bytes(numbers)}, list(differing)


def _as_bytes(numbers: Mapping[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(numbers).encode()), dtype=torch.uint8)


def _numbers_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.dim() == 0:
            value = value.item()
        is_list = type(value) in (list, tuple) and len(value) <= _LONGEST
        parts: Sequence[Any] = value if is_list else [value]
        if isinstance(name, str) and all(isinstance(part, int | float) for part in parts):
            found[name] = value
    return found


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    before = attributes[name]
    if isinstance(before, Tensor):
        before.fill_(value)
    elif isinstance(before, list | tuple):
        attributes[name] = type(before)(value)
    else:
        attributes[name] = value
