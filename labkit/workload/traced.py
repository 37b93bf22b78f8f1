"""The forward of a model as a chain of segments: cut wherever exactly one tensor crosses.

torch.fx calls ``forward`` once, with symbols in place of tensors, and records the operations in
their order. Between two operations, the values that were computed before and are used after cross.
Parameters do not cross: they belong to the segments that use them.

Source: Reed et al., "torch.fx: Practical program capture and transformation" (2022).
"""

import builtins
import inspect
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from labkit.workload.meta import meta_copy

_CALLS = ("call_module", "call_function", "call_method")
# What a tensor has, too: any other attribute is read from a tuple with names.
_OF_TENSORS = ("shape", "dtype", "device", "ndim", "T", "mT", "data", "is_cuda")


class NotTraceableError(Exception):
    """The forward of a model cannot be traced, or is not a function of one tensor."""


@dataclass(frozen=True)
class Segment:
    """Operations between two cuts, as one layer.

    Attributes:
        name: of the submodule that the segment is a call of; empty if it is anything else.
        layer: this submodule itself, or the operations as a module, with the model's own modules
            and parameters in it, under their names in the model.
        calls: how many submodules it calls.
    """

    name: str
    layer: nn.Module
    calls: int


def segments_of(model: nn.Module) -> list[Segment]:
    """The segments of a model's forward, in order.

    Raises:
        NotTraceableError: the forward depends on values or on the mode, takes several tensors, or
            returns something other than one tensor.
    """
    _check_arguments(model)
    # On copies without values: forward may change buffers, and the tracer adds constants.
    shell = meta_copy(model).train()
    graph = _traced(shell)
    if str(graph) != str(_traced(meta_copy(model).eval())):
        raise NotTraceableError(
            "its forward differs between training and evaluation (use nn.Dropout, not "
            "functional.dropout)"
        )
    entering, *nodes, output = [n for n in graph.nodes if n.op != "get_attr"]
    (leaving,) = output.args
    if not isinstance(leaving, fx.Node):
        raise NotTraceableError("its forward does not return one tensor")
    found, start = [], 0
    for end in range(1, len(nodes) + 1):
        crossing = _crossing(entering, nodes[:end], output) if end < len(nodes) else leaving
        if crossing is not None:
            found.append(_segment(model, shell, nodes[start:end], entering, crossing))
            entering, start = crossing, end
    return found


def is_from_torch(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's layers."""
    return type(module).__module__.startswith("torch.nn")


class _Tracer(fx.Tracer):
    """Opens the model's own forward alone: a call of a submodule stays one operation."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        # One tensor; other arguments keep their defaults.
        return root_fn, [self.root, self.create_proxy("placeholder", "inputs", (), {})]


def _check_arguments(model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(needed) > 1:
        raise NotTraceableError(f"its forward takes {' and '.join(needed)}, not one tensor")


def _traced(shell: nn.Module) -> fx.Graph:
    try:
        return _Tracer().trace(shell)
    # The forward is the learner's code, and may fail in any way when it is given a symbol.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise NotTraceableError(f"torch.fx cannot trace its forward ({reason})") from error


def _crossing(entering: fx.Node, before: list[fx.Node], output: fx.Node) -> fx.Node | None:
    """The one tensor that crosses the cut after ``before``; None if there is not exactly one."""
    known = {entering, *before}
    crossing = [node for node in known if any(user not in known for user in node.users)]
    if len(crossing) != 1 or any(_takes_apart(user) for user in crossing[0].users):
        return None
    return crossing[0]


def _takes_apart(user: fx.Node) -> bool:
    """Whether a value that has this user may be something other than a tensor."""
    if user.op != "call_function":
        return False
    if user.target is builtins.getattr:
        return user.args[1] not in _OF_TENSORS
    if user.target is operator.getitem:
        # Only a tensor takes several indices, as in x[:, 0].
        return not isinstance(user.args[1], tuple)
    return user.target in (builtins.len, builtins.iter)


def _segment(
    model: nn.Module, shell: nn.Module, nodes: list[fx.Node], entering: fx.Node, leaving: fx.Node
) -> Segment:
    calls = [node for node in nodes if node.op == "call_module"]
    if len(nodes) == len(calls) == 1 and nodes[0].args == (entering,) and not nodes[0].kwargs:
        return Segment(str(nodes[0].target), model.get_submodule(str(nodes[0].target)), 1)
    graph, found = fx.Graph(), {}
    found[entering] = graph.placeholder("inputs")
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in found:
                assert source.op == "get_attr", "nothing else crosses a cut"
                found[source] = graph.node_copy(source)
        found[node] = graph.node_copy(node, found.__getitem__)
    graph.output(found[leaving])
    used = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    parts = {target: _attribute(model, shell, target) for target in used}
    return Segment("", fx.GraphModule(parts, graph, _label(nodes)), len(calls))


def _attribute(model: nn.Module, shell: nn.Module, target: str) -> Any:
    """A part of the model, or a constant, which the tracer has added to the shell alone."""
    try:
        return operator.attrgetter(target)(model)
    except AttributeError:
        return operator.attrgetter(target)(shell)


def _label(nodes: list[fx.Node]) -> str:
    """``flatten``, or ``conv1..add`` for several operations."""
    names = [getattr(n.target, "__name__", str(n.target)) for n in nodes if n.op in _CALLS]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
