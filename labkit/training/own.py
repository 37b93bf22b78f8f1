"""The learner's own model, data set, loss and optimizer: as objects, or by import path.

In a ``RunConfig`` each has a name: an import path, as in ``my_module:make_model``, or a name to
show, as in ``MyNet (own)``.
"""

import copy
import os
import pkgutil
import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from labkit.config import RunConfig
from labkit.workload.datasets import is_folder
from labkit.workload.samples import seeded

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
    shown = {name: f"{name_of(part)} (own)" for name, part in own.items()}
    return Own(**own), settings | shown


def resolved(config: RunConfig, own: Own) -> Own:
    """``own`` with the parts that the config gives as import paths, and a model on the CPU.

    Raises:
        ValueError: the module or the name in it does not exist.
    """
    found: dict[str, Any] = {}
    for name in PARTS:
        path = getattr(config, name)
        if getattr(own, name) is not None or ":" not in path:
            continue
        if name == "dataset" and is_folder(path):
            continue
        # The script labkit, unlike python -m labkit, does not look in the current directory.
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        try:
            found[name] = pkgutil.resolve_name(path)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{name} {path!r} cannot be imported in {here}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(found[name], str | bool | int | float | None):
            raise ValueError(
                f"{name} {path!r} is {found[name]!r}: name a function that makes a {name}, or "
                f"the {name}"
            )
    model = found.get("model", own.model)
    if isinstance(model, nn.Module) and any(p.is_cuda for p in model.parameters()):
        # The learner's own model stays where it is; each rank moves its copy to its device.
        found["model"] = copy.deepcopy(model).cpu()
    return replace(own, **found)


def made(part: Any, name: str, seed: int) -> Any:
    """What a function or class without arguments makes, always the same from one seed.

    Raises:
        ValueError: it needs arguments, or has raised.
    """
    if not callable(part) or isinstance(part, nn.Module) or hasattr(type(part), "__getitem__"):
        return part
    with seeded(seed):
        try:
            return part()
        except Exception as error:
            raise ValueError(
                f"{name} {name_of(part)}() raised {type(error).__name__}: {error}. Give a "
                f"function without arguments that makes a {name}"
            ) from error


def name_of(part: Any) -> str:
    """A name of an own part, to show."""
    if isinstance(part, list | tuple) and part:
        return name_of(part[0])
    if callable(part) and hasattr(part, "__name__"):
        return part.__name__.strip("<>")
    return type(part).__name__
