"""A learner's function while it runs: what of the library it calls, and what it does to its input.

``Watched`` stands for the function. It looks at every call with Python's profiler, so that a
function is noticed under any name, in any wrapper, and in a copy of its source, too.
"""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice, repeat
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from labkit import collectives, costs, placement, schedules
from labkit.comm.comm import Comm
from workbook.exercises.grader.compare import MOST_ENTRIES

# Where the functions are that an exercise asks for. Their helpers may be called.
_OURS = ("labkit.collectives", "labkit.schedules", "labkit.strategies", "labkit.horovod")
_OURS += ("labkit.placement.planner", "labkit.costs", "labkit.comm.work")
_OURS += ("labkit.workload.samples", "workbook.exercises.programs.with_")
_PYTORCHS = ("torch.distributed", "torch.nn.parallel", "torch.amp.grad_scaler")
_PYTORCHS += ("torch.utils.data.distributed",)
_HELPERS = {"split_chunks", "chunk_bounds", "owned_chunk", "check_split_points", "stage_bounds"}
_HELPERS |= {"predicted_slots", "in_flight", "with_hops", "Action"}
# The classes in these rooms hold data.
_OF_DATA = ("labkit.costs", "labkit.placement", "labkit.workload.samples")
# A decorator such as torch.no_grad.
_PASSES_ON = "torch.utils._contextlib"
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
    """A learner's function. Its arguments have the names in ``signature``.

    ``may_call``: names of library functions, or of modules, that do not count; ``written``: the
    argument that the function has to change; ``keeps``: the names of those whose values it may
    not change; ``around``: makes what each call runs in. What is seen of the calls is in
    ``library``, ``changed`` and ``steps``: see ``Outcome``.
    """

    def __init__(
        self,
        fn: Callable,
        signature: str,
        may_call: Collection[str],
        written: Any = None,
        keeps: Collection[str] = (),
        around: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._fn, self._may_call, self._written, self._around = fn, may_call, written, around
        self._names, self._keeps = signature.split(", ") if signature else [], keeps
        self.library, self.changed, self.steps = "", "", []

    def __call__(self, *args: Any) -> Any:
        before, profile = self._state(args), sys.getprofile()
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            with self._around():
                found = self._fn(*args)
                # A generator's body runs only now; an endless one must not hang the check.
                if isinstance(found, Iterator):
                    found = iter(list(islice(found, MOST_ENTRIES)))
        finally:
            sys.setprofile(profile)
            threading.setprofile(profile)
        after = self._state(args)
        if changed := [name for name in before if before[name] != after[name]]:
            found_now = f"the function changes {changed[0]}, which it should not"
            self.changed = self.changed or found_now
            # The next call is not to fail for it.
            torch.set_grad_enabled(before["autograd's mode"])
            torch.set_default_dtype(before["the default dtype"])
        return found

    def _state(self, args: tuple) -> dict[str, Any]:
        """What a call must leave as it is: of what it writes the memory, of the others all."""
        found: dict[str, Any] = {"autograd's mode": torch.is_grad_enabled()}
        found["the default dtype"] = torch.get_default_dtype()
        for name, arg in zip([*self._names, *repeat("an argument", len(args))], args):
            inside = list(_inside([arg]))
            tensors = [one for one in inside if isinstance(one, Tensor)]
            dense = [one for one in tensors if one.layout is torch.strided]
            found[f"the memory of {name}"] = [(one.data_ptr(), one.shape) for one in dense]
            if arg is self._written:
                continue
            modules = [m for one in inside if isinstance(one, nn.Module) for m in one.modules()]
            parameters = [one for module in modules for one in module.parameters(recurse=False)]
            states = {
                "values": [one._version for one in tensors if name in self._keeps],
                "graph": [one.grad_fn is None for one in tensors],
                "entries": [[*map(id, _entries(one))] for one in inside],
                "mode": [module.training for module in modules],
                "hooks": [(*m._forward_hooks, *m._forward_pre_hooks) for m in modules],
                # Those that a framework leaves are no mistake of the learner's.
                "parameters' hooks": []
                if "torch" in self._may_call
                else list(map(num_hooks, parameters)),
                "parameters": [(one.data_ptr(), one.requires_grad) for one in parameters],
            }
            found |= {f"the {what} of {name}": state for what, state in states.items()}
        return found

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg is time.sleep and not _inside_library(frame):
            self.changed = self.changed or "the function sleeps: wait for an event, not for a time"
        if event != "call":
            return
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if code in _STEPS:
            step, dst, src, sent = _STEPS[code]
            given = frame.f_locals
            num_bytes = getattr(given.get(sent), "nbytes", 0)
            self.steps.append((step, given.get(dst), given.get(src), num_bytes))
        elif (name := _solution(code, module)) and not _inside_library(frame.f_back):
            module, _, function = name.rpartition(".")
            allowed = function in self._may_call or module.startswith(tuple(self._may_call))
            if not self.library and not allowed:
                self.library = name


def _entries(one: Any) -> list:
    if isinstance(one, dict):
        return [*one, *one.values()]
    return [*one] if isinstance(one, (list, tuple)) else []


def _inside(arguments: Iterable[Any]) -> Iterator[Any]:
    """The arguments, and what is in them, if they are lists or dicts."""
    for one in arguments:
        yield one
        yield from _inside(_entries(one))


def num_hooks(parameter: Tensor) -> int:
    """PyTorch has no public way to ask."""
    kinds = "_post_accumulate_grad_hooks", "_backward_hooks"
    return sum(len(getattr(parameter, kind, None) or ()) for kind in kinds)


def _inside_library(frame: FrameType | None) -> bool:
    """Whether a function of labkit or PyTorch, other than the check, has made this call."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("workbook.exercises.grader."):
            return False
        if name.startswith(("labkit.", "workbook.", "torch.")) and name != _PASSES_ON:
            return True
        frame = frame.f_back
    return False


@cache
def _solution(code: CodeType, module: str) -> str:
    """The name of the library's function that this code is, or is a copy of; else ""."""
    name, *inner = code.co_qualname.split(".")
    if name in _HELPERS or name.startswith(("<", "_")):
        return ""
    if module.startswith((*_OURS, *_PYTORCHS)):
        is_data = inner and inner[0] != "<locals>" and module.startswith(_OF_DATA)
        return "" if is_data else f"{module}.{name}"
    copied = len(code.co_code) > _LONG_CODE and not module.startswith(("labkit.", "workbook."))
    return _originals().get(_text_of(code), "") if copied else ""


def _text_of(code: CodeType) -> tuple:
    return code.co_code, code.co_names, code.co_varnames


@cache
def _originals() -> dict[tuple, str]:
    """The text of every function of labkit that solves an exercise -> its name."""
    for room in (collectives, costs, placement, schedules):
        for name in dir(room):
            getattr(room, name)  # each room imports its modules when they are asked for
    found = {}
    for module in [name for name in sys.modules if name.startswith(_OURS)]:
        for name, value in list(vars(sys.modules[module]).items()):
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if code is not None and getattr(value, "__module__", "").startswith(_OURS):
                found[_text_of(code)] = f"{value.__module__}.{name}"
    return found
