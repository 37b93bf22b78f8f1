# isort: skip_file
"""labkit: distributed deep-learning training, from scratch, on real processes."""

__version__: str

# "X as X" hands a name on (PEP 484); labkit/__init__.py reads this list, too.
from . import (
    backend as backend,
    collectives as collectives,
    costs as costs,
    schedules as schedules,
    strategies as strategies,
    units as units,
    workload as workload,
)
from .engine import devices as devices
from .engine.comm.emulated_link import EmulatedLink as EmulatedLink
from .costs.what_if import what_if as what_if
from .engine.errors import (
    DeadlineError as DeadlineError,
    DeadlockError as DeadlockError,
    WorkerError as WorkerError,
)
from .engine.runtime.launch import RunResult as RunResult, run as run
from .engine.runtime.preload import warm_up as warm_up
from .engine.tracing import Span as Span, Trace as Trace
from .training.config import RunConfig as RunConfig
from .training.diff import diff as diff
from .training.recording import recording as recording
from .training.measured import measure_link as measure_link
from .training.result import TrainResult as TrainResult
from .training.train_run import train_with as train_with
from .workload.datasets import load_dataset as load_dataset
from .workload.models import build_model as build_model
