"""The learner's own model, data set, loss and optimizer: as objects, or by import path.

In a ``RunConfig`` each has a name: an import path, as in ``my_module:make_model``, or a name to
show, as in ``MyNet (own)``.
"""

import copy
import importlib
import inspect
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from labkit.config import RunConfig
from labkit.runtime.pickling import find_unpicklable
from labkit.units import closest
from labkit.workload.folders import is_folder
from labkit.workload.random_numbers import seeded

PARTS = ("model", "dataset", "loss", "optimizer")


@dataclass(frozen=True, eq=False)
class Own:
    """The learner's own parts of a run; None where the config names one of labkit's.

    Attributes:
        model: an ``nn.Module``, whose parameters are the starting point; a list of layers; or a
            function or class without arguments that makes one, with the run's seed.
        dataset: see ``workload.samples.parts_of``, or a function that makes it.
        loss: (outputs, targets) -> the mean over the samples; or a class that makes it.
        optimizer: parameters -> ``torch.optim.Optimizer``; a class with its defaults is one.
    """

    model: Any = None
    dataset: Any = None
    loss: Any = None
    optimizer: Any = None

    @property
    def num_bytes(self) -> int:
        """Of the parameters and buffers of a model that is given as an object, not as a name."""
        parts = self.model if isinstance(self.model, list | tuple) else [self.model]
        modules = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        return sum(tensor.nbytes for tensor in (*modules.parameters(), *modules.buffers()))


# A run without own parts.
NOTHING = Own()


def take_own(settings: dict[str, Any]) -> tuple[Own, dict[str, Any]]:
    """Separate own objects from the settings, in which their names take their places."""
    # Anything else that is no name is for ``RunConfig`` to refuse.
    of_config = str | bool | int | float | None
    own = {n: settings[n] for n in PARTS if not isinstance(settings.get(n), of_config)}
    shown = {name: f"{_name_of(part)} (own)" for name, part in own.items()}
    return Own(**own), settings | shown


def resolved(config: RunConfig, own: Own) -> Own:
    """``own`` with the parts that the config gives as import paths, and a model on the CPU.

    Raises:
        ValueError: the module or the name in it does not exist.
    """
    found = {}
    for name in PARTS:
        path = getattr(config, name)
        is_path = ":" in path and not (name == "dataset" and is_folder(path))
        if getattr(own, name) is None and is_path:
            found[name] = _imported(name, path)
    model = found.get("model", own.model)
    if isinstance(model, nn.Module) and any(p.is_cuda for p in model.parameters()):
        # The learner's own model stays where it is; each rank moves its copy to its device.
        found["model"] = copy.deepcopy(model).cpu()
    return replace(own, **found)


def why_not_sent(own: Own) -> str:
    """Which part cannot be pickled for the ranks, and what to do; empty if there is none."""
    for name in PARTS:
        if find_unpicklable(name, part := getattr(own, name)):
            inside = find_unpicklable(name, dict(getattr(part, "__dict__", {})))
            is_made = name in ("model", "dataset")
            way_out = "give a function that makes it" if is_made else "make it inside the function"
            return (
                f"{name} {_name_of(part)} cannot be sent to the ranks, because it cannot be "
                f"pickled{inside and f': {inside}'}. Instead, {way_out}: each rank calls it"
            )
    return ""


def made(part: Any, name: str, seed: int) -> Any:
    """What a function or class without arguments makes, always the same from one seed.

    Raises:
        ValueError: it needs arguments, or has raised.
    """
    if not callable(part) or isinstance(part, nn.Module) or hasattr(type(part), "__getitem__"):
        return part
    shown = _name_of(part)
    try:
        inspect.signature(part).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} {shown} cannot be called without arguments ({error}): give a function that "
            f"needs none, as in lambda: {shown}(...)"
        ) from None
    except ValueError:  # a built-in function that does not say what it takes
        pass
    with seeded(seed):
        try:
            return part()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name} {shown} raised {why}") from error


def _name_of(part: Any) -> str:
    if isinstance(part, list | tuple) and part:
        return _name_of(part[0])
    if callable(part) and hasattr(part, "__name__"):
        return part.__name__.strip("<>")
    return type(part).__name__


def _imported(name: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    # The script labkit, unlike python -m labkit, does not look in the current directory.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        why = f"cannot be imported: {type(error).__name__}: {error}"
        if is_missing:
            why = f"is not in {here} or in this environment: start in its folder, without .py"
        raise ValueError(f"{name} {path!r}: {module_name} {why}") from error
    for word in attribute.split("."):
        if not hasattr(found, word):
            hint = closest(word, dir(found)) or f": write {module_name}:NAME"
            raise ValueError(f"{name} {path!r}: {module_name} has no {word or 'name'}{hint}")
        found = getattr(found, word)
    if isinstance(found, str | bool | int | float | None):
        raise ValueError(
            f"{name} {path!r} is {found!r}: name a function that makes a {name}, or the {name}"
        )
    return found
