"""A learner's function while it runs: the messages it asks for, and what it does to its input.

``Watched`` stands for the function. It notes calls of ``comm`` with Python's profiler.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, repeat
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.comm.comm import Comm
from workbook.exercises.grader.compare import MOST_ENTRIES

# The code of an operation -> its name, and the names of its dst, its src and what it sends.
_STEPS = {
    Comm.send.__code__: ("send", "dst", "", "tensor"),
    Comm.recv.__code__: ("recv", "", "src", ""),
    Comm.recv_add.__code__: ("recv", "", "src", ""),
    Comm.recv_any.__code__: ("recv_any", "", "", ""),
    Comm.exchange.__code__: ("exchange", "dst", "src", "send"),
}


class Watched:
    """A learner's function. Its arguments have the names in ``signature``.

    ``written``: the argument that the function has to change; ``keeps``: the names of those whose
    values it may not change; ``around``: makes what each call runs in. What is seen of the calls
    is in ``changed`` and ``steps``: see ``Outcome``.
    """

    def __init__(
        self,
        fn: Callable,
        signature: str,
        written: Any = None,
        keeps: Collection[str] = (),
        around: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._fn = fn
        self._names = signature.split(", ") if signature else []
        self._written = written
        self._keeps = keeps
        self._around = around
        self.changed = ""
        self.steps: list[tuple] = []

    def __call__(self, *args: Any) -> Any:
        before = self._state(args)
        profile = sys.getprofile()
        threading.setprofile(self._note_step)
        sys.setprofile(self._note_step)
        try:
            with self._around():
                result = self._fn(*args)
                # A generator's body runs only now; an endless one must not hang the check.
                if isinstance(result, Iterator):
                    result = iter(list(islice(result, MOST_ENTRIES)))
        finally:
            sys.setprofile(profile)
            threading.setprofile(profile)
        after = self._state(args)
        if changed := [name for name in before if before[name] != after[name]]:
            if not self.changed:
                self.changed = f"the function changes {changed[0]}, which it should not"
            # The next call is not to fail for it.
            torch.set_grad_enabled(before["autograd's mode"])
            torch.set_default_dtype(before["the default dtype"])
        return result

    def _note_step(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in _STEPS:
            step, dst, src, sent = _STEPS[frame.f_code]
            given = frame.f_locals
            num_bytes = getattr(given.get(sent), "nbytes", 0)
            self.steps.append((step, given.get(dst), given.get(src), num_bytes))

    def _state(self, args: tuple) -> dict[str, Any]:
        """Everything that a call must leave as it is: of ``written`` only the memory."""
        state: dict[str, Any] = {
            "autograd's mode": torch.is_grad_enabled(),
            "the default dtype": torch.get_default_dtype(),
        }
        for name, arg in zip([*self._names, *repeat("an argument", len(args))], args):
            values = list(_inside([arg]))
            tensors = [value for value in values if isinstance(value, Tensor)]
            memory = state[f"the memory of {name}"] = []
            for tensor in tensors:
                if tensor.layout is torch.strided:
                    memory.append((tensor.data_ptr(), tensor.shape))
            if arg is self._written:
                continue
            versions = state[f"the values of {name}"] = []
            graph = state[f"the graph of {name}"] = []
            for tensor in tensors:
                graph.append(tensor.grad_fn is None)
                if name in self._keeps:
                    versions.append(tensor._version)
            state[f"the entries of {name}"] = [[*map(id, _entries(value))] for value in values]
            modes = state[f"the mode of {name}"] = []
            hooks = state[f"the hooks of {name}"] = []
            parameters = state[f"the parameters of {name}"] = []
            for value in values:
                for module in value.modules() if isinstance(value, nn.Module) else ():
                    modes.append(module.training)
                    hooks.append((*module._forward_hooks, *module._forward_pre_hooks))
                    for parameter in module.parameters(recurse=False):
                        parameters.append((parameter.data_ptr(), parameter.requires_grad))
        return state


def _entries(value: Any) -> list:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, (list, tuple)) else []


def _inside(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and what is in them, if they are lists or dicts."""
    for value in values:
        yield value
        yield from _inside(_entries(value))
