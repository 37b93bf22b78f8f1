"""labkit: distributed deep-learning training, from scratch, on real processes."""

import importlib

from labkit.engine import interrupts_later
from labkit.registration import register_backend

_EXPORTS = {
    "run": "labkit.launch",
    "RunResult": "labkit.launch",
    "warm_up": "labkit.engine",
    "Trace": "labkit.trace",
    "Span": "labkit.trace",
    "WorkerError": "labkit.errors",
    "DeadlockError": "labkit.errors",
    "DeadlineError": "labkit.errors",
    "RunConfig": "labkit.config",
    "TrainResult": "labkit.experiment",
    "train_with": "labkit.experiment",
    "load_dataset": "labkit.workload",
    "build_model": "labkit.workload",
    "predict_row": "labkit.predict",
    "show_source": "labkit.display",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    # Lazy: a notebook's first cell should not wait for parts that it does not use.
    with interrupts_later():
        if name in _EXPORTS:
            return getattr(importlib.import_module(_EXPORTS[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"labkit.{_PACKAGES.get(name, name)}")
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


_MODULES = frozenset(
    {
        "backend",
        "check",
        "collectives",
        "costs",
        "devices",
        "plots",
        "schedules",
        "strategies",
        "units",
    }
    | {"widgets", "workload"}
)
# Where a name reads better in a call than the package's does: labkit.check.ring.all_reduce(mine).
_PACKAGES = {"check": "checks"}


def __dir__() -> list[str]:
    return [*__all__, *sorted(_MODULES)]


register_backend()
