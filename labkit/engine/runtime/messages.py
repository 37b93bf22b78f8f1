"""The messages between the caller and the ranks, as pickles: calls, and reports of their end."""

import contextlib
import importlib
import inspect
import io
import math
import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.comm.peak_memory import PeakMemory
from labkit.engine.tracing import Span, Trace
from labkit.engine.tracing.recorder import with_waits

# Pickling and unpickling run code of the objects' classes, which may also call sys.exit.
_FAILURES = (Exception, SystemExit)
# The class of PyTorch's classes in C++. No process can import it: its module does not exist.
_CPP_CLASS = type(torch._C.Future)


class UnpicklableError(ValueError):
    """A function, an argument or a result cannot be sent to another process."""


@dataclass(frozen=True)
class Report:
    """A rank's report of its end for the launcher.

    Attributes:
        kind: ``value``, ``raised``, ``exited`` (SystemExit), ``mismatch`` or ``peer_lost``.
        payload: the value that the function returned, pickled, or (``is_plain``) as
            ``runtime.plain`` makes it.
        summary, location, traceback: of the exception, if ``kind`` is not ``value``.
    """

    rank: int
    kind: str
    payload: bytes = b""
    spans: tuple[Span, ...] = ()
    messages: int = 0
    bytes_sent: int = 0
    device: str = ""
    peak_memory: PeakMemory | None = None
    summary: str = ""
    location: str = ""
    traceback: str = ""
    duration_s: float = 0.0
    is_plain: bool = False


def trace_of(reports: Iterable[Report], link: EmulatedLink | None = None) -> Trace:
    """The trace of the ranks that have returned, over an emulated link."""
    reports = list(reports)
    devices = {report.rank: report.device for report in reports}
    about: dict[str, Any] = {}
    if link is not None:
        settings: dict[str, Any] = asdict(link)
        if math.isinf(link.bandwidth_bytes_per_s):
            settings["bandwidth_bytes_per_s"] = None  # JSON has no infinity
        about["link"] = settings
    return Trace.merge([with_waits(report.spans for report in reports)], devices, about)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's, also for what of PyTorch it cannot pickle.

    Those are classes of a notebook derived from PyTorch's C++ classes, modules of a class of their
    own, such as ``torch.backends.cudnn`` and ``torch.ops.aten``, and operators.
    """

    def reducer_override(self, obj: Any) -> Any:
        if obj is _CPP_CLASS:
            return type, (torch._C.Future,)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            if sys.modules.get(obj.__name__) is obj:
                return importlib.import_module, (obj.__name__,)
            if isinstance(obj, torch._ops._OpNamespace):
                return getattr, (torch.ops, obj.name)
        if isinstance(obj, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return attrgetter(str(obj)), (torch.ops,)
        return super().reducer_override(obj)


class _ResultPickler(_Pickler):
    """A pickler that brings tensors, inside any object, to the CPU, without their graph."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or (obj.is_leaf and obj.device.type == "cpu"):
            return super().reducer_override(obj)
        moved = obj.detach().cpu()
        if isinstance(obj, nn.Parameter):
            moved = nn.Parameter(moved, obj.requires_grad)
        return moved.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def dumps(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    with io.BytesIO() as buffer:
        pickler(buffer).dump(value)
        return buffer.getvalue()


def dump_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function with its arguments; UnpicklableError names what cannot be pickled."""
    if not callable(fn):
        raise ValueError(f"fn must be a function of a comm, got {type(fn).__name__}")
    name = getattr(fn, "__name__", "fn")
    try:
        return dumps((fn, args))
    except _FAILURES as error:
        used = {f"args[{index}]": arg for index, arg in enumerate(args)}
        with contextlib.suppress(TypeError):
            variables = inspect.getclosurevars(fn)
            used |= {**variables.globals, **variables.nonlocals}
        culprit = _first_unpicklable(used) or "an object"
        raise UnpicklableError(
            f"{name} cannot be sent to other processes: it uses {culprit}, which cannot be "
            f"pickled ({error}). Create it inside the function; in place of a model, a data set, "
            "a loss or an optimizer give train_with a function that makes it."
        ) from None


def dump_value(value: Any) -> bytes:
    """Pickle a rank's result, with tensors on the CPU: the launcher must never initialize CUDA."""
    try:
        return dumps(value, _ResultPickler)
    except MemoryError:
        raise
    except _FAILURES as error:
        kind = type(value)
        culprit = find_unpicklable("value", value) or f"value ({kind.__module__}.{kind.__name__})"
        raise UnpicklableError(
            f"the result cannot be sent back: {culprit} cannot be pickled ({error}). Return "
            "tensors, numbers, or containers of them"
        ) from None


def find_unpicklable(name: str, value: Any, dump: Callable[[Any], object] = dumps) -> str:
    """Return the first part that ``dump`` refuses, as ``value['lock'] (_thread.lock)``, or ""."""
    try:
        dump(value)
        return ""
    except _FAILURES:
        pass
    parts = {}
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {f"{name}[{index}]": part for index, part in enumerate(value)}
    value_type = f"{type(value).__module__}.{type(value).__qualname__}"
    return _first_unpicklable(parts, dump) or f"{name} ({value_type})"


def _first_unpicklable(parts: dict[str, Any], dump: Callable[[Any], object] = dumps) -> str:
    for name, part in parts.items():
        culprit = find_unpicklable(name, part, dump)
        if culprit:
            return culprit
    return ""
