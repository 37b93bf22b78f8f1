"""Show labkit's source code in a notebook, so that the page shows the code that runs."""

import inspect
from collections.abc import Callable
from typing import Any


class Source:
    """The source of a function or class, highlighted in a notebook, plain text elsewhere."""

    def __init__(self, text: str, where: str):
        self.text = text
        self.where = where

    def __repr__(self) -> str:
        return f"# {self.where}\n{self.text}"

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        look = {"style": "friendly", "nobackground": True, "noclasses": True}
        formatter = HtmlFormatter(prestyles="font-family: monospace", **look)
        body = highlight(self.text, PythonLexer(), formatter)
        return f"<details open><summary><code>{self.where}</code></summary>{body}</details>"


def show_source(thing: Callable[..., Any] | type) -> Source:
    """Show the source of a labkit function or class, as installed.

    Raises:
        ValueError: ``thing`` has no Python source, for example because it is written in C.
    """
    try:
        text = inspect.getsource(thing)
    except (OSError, TypeError) as error:
        raise ValueError(f"{thing!r} has no Python source to show: {error}") from None
    module = inspect.getmodule(thing)
    return Source(text, f"{module.__name__}.{thing.__qualname__}" if module else "")
