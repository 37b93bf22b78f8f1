from . import (
    backend as backend,
)
from . import (
    check as check,
)
from . import (
    collectives as collectives,
)
from . import (
    costs as costs,
)
from . import (
    devices as devices,
)
from . import (
    placement as placement,
)
from . import (
    plots as plots,
)
from . import (
    schedules as schedules,
)
from . import (
    strategies as strategies,
)
from . import (
    units as units,
)
from . import (
    widgets as widgets,
)
from . import (
    workload as workload,
)
from .config import RunConfig as RunConfig
from .errors import DeadlineError as DeadlineError
from .errors import DeadlockError as DeadlockError
from .errors import WorkerError as WorkerError
from .notebook.display import show_source as show_source
from .notebook.predict import predict_row as predict_row
from .runtime.launch import RunResult as RunResult
from .runtime.launch import run as run
from .runtime.preload import warm_up as warm_up
from .trace import Span as Span
from .trace import Trace as Trace
from .training.result import TrainResult as TrainResult
from .training.train_run import train_with as train_with
from .workload.datasets import load_dataset as load_dataset
from .workload.models import build_model as build_model
