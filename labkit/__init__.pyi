# isort: skip_file
"""labkit: distributed deep-learning training, from scratch, on real processes."""

__version__: str

# "X as X" hands a name on (PEP 484); labkit/__init__.py reads this list, too.
from . import (
    backend as backend,
    collectives as collectives,
    costs as costs,
    devices as devices,
    placement as placement,
    schedules as schedules,
    strategies as strategies,
    units as units,
    workload as workload,
)
from .comm.emulated_link import EmulatedLink as EmulatedLink
from .config import RunConfig as RunConfig
from .costs.what_if import what_if as what_if
from .errors import (
    DeadlineError as DeadlineError,
    DeadlockError as DeadlockError,
    WorkerError as WorkerError,
)
from .runtime.launch import RunResult as RunResult, run as run
from .runtime.preload import warm_up as warm_up
from .tracing import Span as Span, Trace as Trace
from .training.diff import diff as diff
from .training.recording import recording as recording
from .training.measured import measure_link as measure_link
from .training.result import TrainResult as TrainResult
from .training.train_run import train_with as train_with
from .workload.datasets import load_dataset as load_dataset
from .workload.models import build_model as build_model
