"""Stubs: whether the learner has begun, and whether the raise is still in a finished answer."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

# A stub is told by this line, not by the type: PyTorch raises NotImplementedError, too.
STUB = "raise NotImplementedError"
# A stub may contain one line that prepares the result, and one that returns it.
_GIVEN_LINES = 2
_WORK = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match, ast.AugAssign, ast.FunctionDef)


def is_untouched(fn: Callable) -> bool:
    """Whether ``fn`` can be seen to be a stub without a call: a docstring, and the raise."""
    own = _plain_function(fn)
    body = [] if inspect.isclass(own) else _body(own)
    return any(isinstance(line, ast.Raise) for line in body) and all(map(_is_filler, body))


def is_stub(fn: Callable, raised_in: str) -> bool:
    """Whether ``fn`` is still a stub, where the stub ``raised_in`` ("" for none) was reached."""
    own = _plain_function(fn)
    if not inspect.isclass(own):
        same = raised_in == getattr(own, "__name__", raised_in)
        return bool(raised_in) and same and not _has_work(_body(own))
    if raised_in not in vars(own):
        return False
    # A class: it has begun if any method of it is written; an ``__init__`` may be given.
    for name, method in vars(own).items():
        body = _body(method) if inspect.isfunction(method) else []
        if any(isinstance(line, _WORK) for line in body) or (
            name != "__init__" and _has_work(body)
        ):
            return False
    return True


def about_stub(fn: Callable, raised_in: str) -> str:
    """What to say where a written function came to the raise of the stub ``raised_in``."""
    if raised_in == getattr(_plain_function(fn), "__name__", raised_in):
        return f"the function is written, but the stub's line {STUB} is still in it: delete it"
    return f"the function calls {raised_in}, which is not written yet: it is still a stub"


def _plain_function(fn: Callable) -> Callable:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    is_written = inspect.isfunction(fn) or inspect.ismethod(fn) or inspect.isclass(fn)
    return fn if is_written else type(fn).__call__


def _body(function: Callable) -> list[ast.stmt]:
    """The lines of a function; [] if its source is not known."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    first = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    return first.body if first else []


def _has_work(body: list[ast.stmt]) -> bool:
    lines = [line for line in body if not _is_filler(line)]
    if len(lines) > _GIVEN_LINES or any(isinstance(x, (*_WORK, ast.Expr)) for x in lines):
        return True
    match lines:
        case [ast.Return(value=value)]:
            return not isinstance(value, (ast.Name, ast.Constant, type(None)))
    return False


def _is_filler(line: ast.stmt) -> bool:
    """A docstring, ``...``, ``pass`` or the stub's raise."""
    if isinstance(line, ast.Expr):
        return isinstance(line.value, ast.Constant)
    is_raise = isinstance(line, ast.Raise) and STUB in ast.unparse(line)
    return is_raise or isinstance(line, ast.Pass)
