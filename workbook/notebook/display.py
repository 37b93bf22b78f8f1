"""Show labkit's source code in a notebook, so that the page shows the code that runs."""

import html
import inspect
from collections.abc import Callable
from typing import Any


class Source:
    """The source of a function or class: a block of code in a notebook, plain text elsewhere."""

    def __init__(self, text: str, where: str):
        self.text, self.where = text, where

    def __repr__(self) -> str:
        return f"# {self.where}\n{self.text}"

    def _repr_markdown_(self) -> str:
        head = f"<summary><code>{html.escape(self.where)}</code></summary>"
        return f"<details open>{head}\n\n~~~~python\n{self.text}\n~~~~\n\n</details>"


def show_source(thing: Callable[..., Any] | type, *, numbered: bool = False) -> Source:
    """Show the Python source of a labkit function or class, as installed.

    ``numbered`` puts before each line its number in the file.
    """
    where = f"{thing.__module__}.{thing.__qualname__}"
    lines, first = inspect.getsourcelines(thing)
    shown = [
        f"{number:4}  {line}" if numbered else line for number, line in enumerate(lines, first)
    ]
    return Source("".join(shown).rstrip(), where)
