"""The learner's own model, data set, loss and optimizer: as objects, or by import path.

In a ``RunConfig`` each has a name: an import path, as in ``my_module:make_model``, or a name to
show, as in ``MyNet (own)``.
"""

import copy
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from labkit.config import RunConfig
from labkit.runtime.pickling import find_unpicklable
from labkit.workload.folders import is_folder
from labkit.workload.random_numbers import seeded


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
        parts = self.model if isinstance(self.model, (list, tuple)) else [self.model]
        modules = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        return sum(tensor.nbytes for tensor in (*modules.parameters(), *modules.buffers()))

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) is None for name in PARTS)


# A run without own parts.
NOTHING = Own()
PARTS = ("model", "dataset", "loss", "optimizer")


def take_own(settings: dict[str, Any]) -> tuple[Own, dict[str, Any]]:
    """Separate own objects from the settings, in which their names take their places."""
    own = {name: settings[name] for name in PARTS if not _is_setting(settings.get(name))}
    shown = {name: f"{_name_of(part)} (own)" for name, part in own.items()}
    return Own(**own), settings | shown


def resolved(config: RunConfig, own: Own) -> Own:
    """``own`` with the parts that the config gives as import paths, and a model on the CPU.

    Raises:
        ValueError: the module or the name in it does not exist.
    """
    paths = {name: getattr(config, name) for name in PARTS if getattr(own, name) is None}
    if is_folder(config.dataset):
        paths.pop("dataset", None)
    found = {name: _imported(name, path) for name, path in paths.items() if ":" in path}
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
    _check_needs_nothing(part, name)
    with seeded(seed):
        try:
            return part()
        except Exception as error:
            raise ValueError(
                f"{name} {_name_of(part)} raised {type(error).__name__}: {error}"
            ) from error


def _check_needs_nothing(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function that does not say what it takes
        return
    try:
        signature.bind()
    except TypeError as error:
        shown = _name_of(function)
        raise ValueError(
            f"{name} {shown} cannot be called without arguments ({error}): give a function that "
            f"needs none, as in lambda: {shown}(...)"
        ) from None


def _is_setting(value: Any) -> bool:
    """Whether a value is for ``RunConfig`` to judge: a name, or something that is no own part."""
    return value is None or isinstance(value, (str, bool, int, float))


def _name_of(part: Any) -> str:
    if isinstance(part, (list, tuple)) and part:
        return _name_of(part[0])
    if callable(part) and hasattr(part, "__name__"):
        return part.__name__.strip("<>")
    return type(part).__name__


def _imported(name: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    module = _module(name, path, module_name)
    found: Any = module
    for word in attribute.split("."):
        if not hasattr(found, word):
            near = difflib.get_close_matches(word, dir(found), n=1)
            hint = f"did you mean {near[0]}?" if near else f"write {module_name}:NAME"
            raise ValueError(f"{name} {path!r}: {module_name} has no {word or 'name'}: {hint}")
        found = getattr(found, word)
    if found is None or isinstance(found, (str, bool, int, float)):
        raise ValueError(
            f"{name} {path!r} is {found!r}: name a function that makes a {name}, or the {name}"
        )
    return found


def _module(name: str, path: str, module_name: str) -> Any:
    # The script labkit, unlike python -m labkit, does not look in the current directory.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{name} {path!r}: {module_name} needs a module: {error}") from None
        raise ValueError(
            f"{name} {path!r}: there is no module {error.name} in {here} or in this environment: "
            "start labkit in the folder of the module, or write MODULE:NAME without .py"
        ) from None
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name} {path!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
