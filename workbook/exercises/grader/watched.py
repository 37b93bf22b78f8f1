"""What a learner's function does while it runs: which functions of the library it calls, and how.

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

import labkit
from labkit import collectives, costs, placement, schedules
from labkit.comm.comm import Comm

_GRADER = str(Path(__file__).parent)
_LABKIT, _WORKBOOK = str(Path(labkit.__file__).parent), str(Path(_GRADER).parents[1])
# Where the functions are that an exercise asks for. Their helpers may be called.
_PARTS = (
    *("collectives/", "schedules/", "strategies/", "placement/planner", "placement/search"),
    *("costs/pipeline_timeline", "workload/sampling", "comm/work.py", "horovod/"),
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

    Attributes:
        library: the first function called that solves the exercise, such as
            ``labkit.collectives.ring.share_reduce``; "" if none was.
        called: all such functions, those in ``may_call``, too.
        steps: the calls of comm, see ``Outcome``.
    """

    def __init__(self, fn: Callable, signature: str, may_call: Collection[str]):
        self._fn, self._may_call = fn, may_call
        self._names = names_to_call_by(fn, signature)
        self.library, self.called, self.steps = "", set[str](), []

    def __call__(self, *args: Any) -> Any:
        with self._watching():
            named = dict(zip(self._names, args))
            found = self._fn(*args[len(named) :], **named)
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
        elif (name := _solution(code)) and not _inside_labkit(frame.f_back):
            self.called.add(name)
            if not self.library and self._counts(name):
                self.library = name

    def _counts(self, name: str) -> bool:
        module, _, function = name.rpartition(".")
        return function not in self._may_call and not module.startswith(tuple(self._may_call))


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


def _inside_labkit(frame: FrameType | None) -> bool:
    """Whether a function of labkit, other than the check, has made this call."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_GRADER):
            return False
        if name.startswith((_LABKIT, _WORKBOOK)) or "/torch/" in name:
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
        # The classes in schedules and costs hold data.
        is_data = inner and "/strategies/" not in file and inner[0] != "<locals>"
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
