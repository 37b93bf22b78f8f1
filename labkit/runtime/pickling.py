"""Pickling between the caller and the ranks; errors name the part that cannot be pickled."""

import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from labkit.errors import WorkerError
from labkit.runtime.messages import Report, described
from labkit.runtime.shortages import num_bytes, result_too_large

# How many levels of nested containers are searched for the part that cannot be pickled.
_MOST_DEPTH = 20
# Pickling runs code of the objects' classes, which may also call sys.exit.
_FAILURES = (Exception, SystemExit)


class UnpicklableError(ValueError):
    """A function, an argument or a result cannot be sent to another process."""


# The class of PyTorch's classes in C++. No process can import it: its module does not exist.
_CPP_CLASS = type(torch._C.Future)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's, also for classes of a notebook derived from PyTorch's C++ classes."""

    def reducer_override(self, obj: Any) -> Any:
        return (type, (torch._C.Future,)) if obj is _CPP_CLASS else super().reducer_override(obj)


class _ResultPickler(_Pickler):
    """Tensors on a GPU, inside any object, become tensors on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.device.type == "cpu":
            return super().reducer_override(obj)
        moved = obj.detach().cpu()
        if isinstance(obj, nn.Parameter):
            moved = nn.Parameter(moved, obj.requires_grad)
        return moved.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def dumps(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    """``value`` pickled, by value if the ranks could not import it."""
    with io.BytesIO() as buffer:
        pickler(buffer).dump(value)
        return buffer.getvalue()


def dump_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function with its arguments, by value if the ranks could not import it.

    Raises:
        ValueError: ``fn`` is no function that a call completes.
        UnpicklableError: names the argument, global or closure variable that cannot be pickled.
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function of a comm, got {type(fn).__name__}")
    name = getattr(fn, "__name__", "fn")
    if inspect.iscoroutinefunction(fn):
        raise ValueError(
            f"{name} is an async function, whose call does nothing by itself: give run a function "
            f"that calls asyncio.run({name}(comm))"
        )
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ValueError(
            f"{name} is a generator function (it has yield), whose call does nothing by itself: "
            "return a list of its values"
        )
    try:
        return dumps((fn, args))
    except _FAILURES as error:
        used = {f"args[{index}]": arg for index, arg in enumerate(args)}
        if (code := getattr(fn, "__code__", None)) is not None:
            values = getattr(fn, "__globals__", {})
            used |= {one: values[one] for one in code.co_names if one in values}
            cells = (cell.cell_contents for cell in getattr(fn, "__closure__", None) or ())
            used |= dict(zip(code.co_freevars, cells))
        culprits = (find_unpicklable(*item) for item in used.items())
        culprit = next(filter(None, culprits), "an object")
        raise UnpicklableError(
            f"{name} cannot be sent to other processes: it uses {culprit}, which cannot be "
            f"pickled ({error}). Create it inside the function."
        ) from None


def dump_value(value: Any) -> bytes:
    """Pickle a rank's result, with tensors on the CPU: the launcher must never initialise CUDA.

    Raises:
        UnpicklableError: names the part that cannot be pickled.
        MemoryError: there is no memory for a copy.
    """
    try:
        # A tensor of a graph cannot be pickled.
        return dumps(tree_map_only(Tensor, Tensor.detach, value), _ResultPickler)
    except MemoryError:
        raise MemoryError(result_too_large(num_bytes(value))) from None
    except _FAILURES as error:
        kind = type(value)
        culprit = find_unpicklable("value", value) or f"value ({kind.__module__}.{kind.__name__})"
        raise UnpicklableError(
            f"{culprit} cannot be pickled ({described(error)}). "
            "Return tensors, numbers, or containers of them"
        ) from None


def load_value(report: Report) -> Any:
    """Unpickle the value that a rank returned.

    Raises:
        WorkerError: unpickling runs code of the value's class, and this code raised or called
            sys.exit; or there is no memory for it.
    """
    try:
        return pickle.loads(report.payload)
    except MemoryError:
        text = result_too_large(len(report.payload))
        raise WorkerError(f"rank {report.rank}: {text}", rank=report.rank) from None
    except _FAILURES as error:
        raise WorkerError(
            f"rank {report.rank} returned a value that cannot be unpickled here: "
            f"{type(error).__name__}: {described(error)}. Return tensors, numbers, or containers "
            "of them",
            rank=report.rank,
        ) from error


def find_unpicklable(
    name: str, value: Any, dump: Callable[[Any], object] | None = None, depth: int = 0
) -> str:
    """The path to the first part that ``dump`` refuses, as ``value['lock'] (_thread.lock)``.

    The path is empty if ``value`` can be dumped; by default as a pickle.
    """
    try:
        (dump or dumps)(value)
        return ""
    except _FAILURES:
        pass
    parts: list[tuple[str, Any]] = []
    # The depth has a limit: a value that contains itself has no innermost part.
    if isinstance(value, dict) and depth < _MOST_DEPTH:
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)) and depth < _MOST_DEPTH:
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    inside = (find_unpicklable(path, part, dump, depth + 1) for path, part in parts)
    itself = f"{name} ({type(value).__module__}.{type(value).__qualname__})"
    return next(filter(None, inside), itself)
