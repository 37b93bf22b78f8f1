"""Tell a stub, in which nothing is written yet, from an attempt."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

# A stub is told by this line, not by the type: PyTorch raises NotImplementedError, too.
_STUB = "raise NotImplementedError"
# A stub's ``__init__`` may have as many lines.
_GIVEN_LINES = 2


def is_stub(fn: Callable) -> bool:
    """Tell if nothing of a function or class is written: only docstrings, and the raise."""
    written = _plain_function(fn)
    lines = []
    if inspect.isclass(written):
        for name, method in vars(written).items():
            if not inspect.isfunction(method):
                continue
            body = _body(method)
            is_given = len("\n".join(map(ast.unparse, body)).splitlines()) <= _GIVEN_LINES
            if name != "__init__" or not is_given:
                lines += body
    else:
        lines = _body(written)
    return any(isinstance(line, ast.Raise) for line in lines) and all(map(_is_filler, lines))


def _plain_function(fn: Callable) -> Callable:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    if inspect.isfunction(fn) or inspect.ismethod(fn) or inspect.isclass(fn):
        return fn
    return type(fn).__call__


def _body(function: Callable) -> list[ast.stmt]:
    """The lines of a function; [] if its source is not known."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            return node.body
    return []


def _is_filler(line: ast.stmt) -> bool:
    """A docstring, ``...``, ``pass`` or the stub's raise."""
    if isinstance(line, ast.Expr):
        return isinstance(line.value, ast.Constant)
    is_raise = isinstance(line, ast.Raise) and _STUB in ast.unparse(line)
    return is_raise or isinstance(line, ast.Pass)
