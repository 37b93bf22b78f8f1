"""Stubs: whether the learner has begun, and whether the raise is still in a finished answer."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from traceback import extract_tb

from workbook.exercises.grader.words import Mistake

# A stub is told by this line, not by the type: PyTorch raises NotImplementedError, too.
STUB = "raise NotImplementedError"
# A stub may contain one line that prepares the result, and one that returns it.
_GIVEN_LINES = 2
_WORK = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match, ast.AugAssign, ast.FunctionDef)


def raised_by_stub(error: BaseException) -> str:
    """The function whose stub has raised ``error``; "" if it was not raised by a stub."""
    last = extract_tb(error.__traceback__)[-1]
    is_stubs = isinstance(error, NotImplementedError) and STUB in (last.line or "")
    return last.name if is_stubs else ""


def is_untouched(fn: Callable) -> bool:
    """Whether ``fn`` can be seen to be a stub without a call: a docstring, and the raise."""
    own = _plain_function(fn)
    body = [] if inspect.isclass(own) else _body(own)
    return any(isinstance(line, ast.Raise) for line in body) and all(map(_is_filler, body))


def is_stub(fn: Callable, raised_in: str) -> bool:
    """Whether ``fn`` is still a stub, where the stub ``raised_in`` ("" for none) was reached."""
    own = _plain_function(fn)
    if inspect.isclass(own):
        return raised_in in vars(own) and not _has_begun(own)
    if raised_in != getattr(own, "__name__", raised_in) or not raised_in:
        return False
    return not _has_work(_body(own))


def _has_begun(cls: type) -> bool:
    """Whether a method of the class is written; an ``__init__`` may be given."""
    for name, method in vars(cls).items():
        body = _body(method) if inspect.isfunction(method) else []
        if any(isinstance(line, _WORK) for line in body):
            return True
        if name != "__init__" and _has_work(body):
            return True
    return False


def _body(function: Callable) -> list[ast.stmt]:
    """The lines of a function; [] if its source is not known."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    first = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    return first.body if first else []


def about_stub(fn: Callable, raised_in: str, place: str = "") -> Mistake:
    """What to tell where a written function came to the raise of the stub ``raised_in``."""
    if raised_in == getattr(_plain_function(fn), "__name__", raised_in):
        return Mistake("stub.raise_left", place=place)
    return Mistake("stub.calls_stub", name=raised_in, place=place)


def _plain_function(fn: Callable) -> Callable:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    is_written = inspect.isfunction(fn) or inspect.ismethod(fn) or inspect.isclass(fn)
    return fn if is_written else type(fn).__call__


def _has_work(body: list[ast.stmt]) -> bool:
    lines = [line for line in body if not _is_filler(line)]
    if any(isinstance(line, _WORK) for line in lines) or len(lines) > _GIVEN_LINES:
        return True
    if any(isinstance(line, ast.Expr) for line in lines):
        return True
    match lines:
        case [ast.Return(value=value)]:
            return not isinstance(value, (ast.Name, ast.Constant, type(None)))
    return False


def _is_filler(line: ast.stmt) -> bool:
    """A docstring, ``...``, ``pass`` or the stub's raise."""
    if isinstance(line, ast.Expr):
        return isinstance(line.value, ast.Constant)
    return isinstance(line, ast.Pass) or (
        isinstance(line, ast.Raise) and STUB in ast.unparse(line)
    )
