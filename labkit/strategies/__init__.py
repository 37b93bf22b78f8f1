"""The techniques, one a file. They import neither each other nor the training loop."""

import importlib
from collections.abc import Callable

# name -> (module, class, class of PyTorch's counterpart in labkit.strategies.torch_builtin)
_STRATEGIES = {
    "single": ("single", "Single", "Single"),
    "ring_all_reduce": ("ring_all_reduce", "RingAllReduce", "TorchDDP"),
}
STRATEGIES = tuple(_STRATEGIES)


def check_name(name: str) -> None:
    """Raise ValueError, listing the known names, for an unknown one."""
    if name not in _STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: choose one of {', '.join(STRATEGIES)}")


def get(name: str, *, builtin: bool = False) -> Callable:
    """The class that implements a technique, ours or PyTorch's counterpart.

    Raises:
        ValueError: unknown name.
    """
    check_name(name)
    module, ours, torchs = _STRATEGIES[name]
    if builtin and torchs != ours:
        return getattr(importlib.import_module("labkit.strategies.torch_builtin"), torchs)
    return getattr(importlib.import_module(f"labkit.strategies.{module}"), ours)
