"""A learner's function while it runs: what of the library it calls, and what it does to its input.

``Watched`` stands for the function. It looks at every call with Python's profiler, so that a
function is noticed under any name, in any wrapper, and in a copy of its source, too.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import labkit
from labkit import collectives, costs, placement, schedules
from labkit.comm.comm import Comm

_GRADER = str(Path(__file__).parent)
_LABKIT, _WORKBOOK = str(Path(labkit.__file__).parent), str(Path(_GRADER).parents[1])
# Where the functions are that an exercise asks for. Their helpers may be called.
_PARTS = (
    *("collectives/", "schedules/", "strategies/", "placement/planner"),
    *("costs/pipeline_timeline", "workload/samples", "comm/work.py", "horovod/"),
)
_SOLUTIONS = tuple(f"{_LABKIT}/{part}" for part in _PARTS)
_SOLUTIONS += (f"{_WORKBOOK}/exercises/programs/with_",)
_HELPERS = {
    *("split_chunks", "chunk_bounds", "owned_chunk", "check_split_points", "stage_bounds"),
    *("predicted_slots", "in_flight", "with_hops"),
}
_PYTORCH = (
    *("/torch/distributed/", "/torch/nn/parallel/", "/torch/utils/data/distributed.py"),
    *("/torch/amp/grad_scaler.py",),
)
# A shorter function may be the same by chance.
_LONG_CODE = 100
_STEPS = {
    Comm.send.__code__: ("send", "dst", "", "tensor"),
    Comm.recv.__code__: ("recv", "", "src", ""),
    Comm.recv_add.__code__: ("recv", "", "src", ""),
    Comm.recv_any.__code__: ("recv_any", "", "", ""),
    Comm.exchange.__code__: ("exchange", "dst", "src", "send"),
}


class Watched:
    """A learner's function, called by its parameters' names if it has those of the stub.

    Args:
        fn: the function.
        signature: the names of the arguments with which it is called, in one string.
        may_call: names of library functions, or of modules, that do not count.
        written: the argument that the function has to change.

    Attributes:
        library: the first function called that solves the exercise, such as
            ``labkit.collectives.ring.share_reduce``; "" if none was.
        called: all such functions, those in ``may_call``, too.
        changed: what a call has done to its arguments, in words; "" if nothing.
        steps: the calls of comm, see ``Outcome``.
    """

    def __init__(
        self, fn: Callable, signature: str, may_call: Collection[str], written: Any = None
    ):
        self._fn, self._may_call, self._written = fn, may_call, written
        self._names = names_to_call_by(fn, signature)
        self.library, self.called, self.steps = "", set[str](), []
        self.changed = ""

    def __call__(self, *args: Any) -> Any:
        given = (
            one for argument in args if argument is not self._written for one in _inside(argument)
        )
        before = [(one, _state(one)) for one in given]
        grad_mode, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        with self._watching():
            named = dict(zip(self._names, args))
            found = self._fn(*args[len(named) :], **named)
        for one, state in before:
            for name, was in state.items():
                if _state(one)[name] != was and not self.changed:
                    self.changed = f"the function changes what it was given: the {name}"
        if (grad_mode, dtype) != (torch.is_grad_enabled(), torch.get_default_dtype()):
            self.changed = "the function leaves autograd, or the default dtype, in another mode"
            torch.set_grad_enabled(grad_mode)
            torch.set_default_dtype(dtype)
        return self._watched(found) if isinstance(found, Generator) else found

    def _watched(self, generator: Generator) -> Iterator:
        """A generator's body runs only now, entry by entry."""
        end = object()
        while True:
            with self._watching():
                entry = next(generator, end)
            if entry is end:
                return
            yield entry

    @contextmanager
    def _watching(self) -> Iterator[None]:
        before = sys.getprofile()
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code in _STEPS:
            step, dst, src, sent = _STEPS[code]
            given = frame.f_locals
            num_bytes = getattr(given.get(sent), "nbytes", 0)
            self.steps.append((step, given.get(dst), given.get(src), num_bytes))
        elif (name := _solution(code)) and not _inside_library(frame.f_back):
            self.called.add(name)
            module, _, function = name.rpartition(".")
            allowed = function in self._may_call or module.startswith(tuple(self._may_call))
            if not self.library and not allowed:
                self.library = name


def _inside(argument: Any) -> Iterator[Any]:
    """An argument, and what is in it, if it is a list."""
    yield argument
    for one in argument if isinstance(argument, list) else ():
        yield from _inside(one)


def _state(argument: Any) -> dict[str, Any]:
    """What a call must leave as it is: a tensor's memory and graph, a list, a module's modes."""
    if isinstance(argument, Tensor):
        is_dense = argument.layout is torch.strided
        memory = argument.data_ptr() if is_dense else 0, argument.shape
        return {"memory of a tensor": memory, "graph behind a tensor": argument.grad_fn is None}
    if isinstance(argument, nn.Module):
        modules = list(argument.modules())
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
        memory = [parameter.data_ptr() for parameter in argument.parameters()]
        modes = [module.training for module in modules]
        return {"mode of a module": modes, "hooks of a module": hooks, "parameters": memory}
    return {"length of a list": len(argument)} if isinstance(argument, list) else {}


def names_to_call_by(fn: Callable, signature: str) -> list[str]:
    """The names of the arguments if ``fn`` has parameters of all these names; else []."""
    names = signature.split(", ")
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [name for name in names if name in parameters and parameters[name].kind in named]
    return names if known == names else []


def _inside_library(frame: FrameType | None) -> bool:
    """Whether a function of labkit or PyTorch, other than the check, has made this call."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_GRADER):
            return False
        # Decorators such as torch.no_grad only pass the call on.
        passes_on = name.endswith("/torch/utils/_contextlib.py")
        if name.startswith((_LABKIT, _WORKBOOK)) or ("/torch/" in name and not passes_on):
            return True
        frame = frame.f_back
    return False


@cache
def _solution(code: CodeType) -> str:
    """The name of the library's function that this code is, or is a copy of; else ""."""
    file, (name, *inner) = code.co_filename, code.co_qualname.split(".")
    if name in _HELPERS or name.startswith(("<", "_")):
        return ""
    if file.startswith(_SOLUTIONS):
        # The classes in these rooms hold data.
        rooms = tuple(f"{_LABKIT}/{room}/" for room in ("schedules", "costs", "placement"))
        is_data = inner and inner[0] != "<locals>" and file.startswith(rooms)
        return "" if is_data else _dotted(file, name)
    if any(part in file for part in _PYTORCH):
        return "torch" + _dotted(file, name).rpartition("torch")[2]
    copied = len(code.co_code) > _LONG_CODE and not file.startswith((_LABKIT, _WORKBOOK))
    return _originals().get(_text_of(code), "") if copied else ""


def _dotted(file: str, name: str) -> str:
    for package in (_LABKIT, _WORKBOOK):
        file = file.removeprefix(str(Path(package).parent))
    inside = file.removesuffix(".py").strip("/")
    return f"{inside.replace('/', '.')}.{name}"


def _text_of(code: CodeType) -> tuple:
    return code.co_code, code.co_names, code.co_varnames


@cache
def _originals() -> dict[tuple, str]:
    """The text of every function of labkit that solves an exercise -> its name."""
    for room in (collectives, costs, placement, schedules):
        for name in dir(room):
            getattr(room, name)  # each room imports its modules when they are asked for
    found = {}
    files = {name: getattr(m, "__file__", None) or "" for name, m in list(sys.modules.items())}
    for module in [sys.modules[name] for name in files if files[name].startswith(_SOLUTIONS)]:
        for name, value in list(vars(module).items()):
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if code is not None and code.co_filename.startswith(_SOLUTIONS):
                found[_text_of(code)] = _dotted(code.co_filename, name)
    return found
