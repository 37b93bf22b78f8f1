"""Show labkit's source code in a notebook, so that the page shows the code that runs."""

import html
import inspect
from collections.abc import Callable
from typing import Any


class Source:
    """The source of a function or class: a block of code in a notebook, plain text elsewhere."""

    def __init__(self, text: str, name: str):
        self.text = text
        self.name = name

    def __repr__(self) -> str:
        return f"# {self.name}\n{self.text}"

    def _repr_markdown_(self) -> str:
        head = f"<summary><code>{html.escape(self.name)}</code></summary>"
        return f"<details open>{head}\n\n~~~~python\n{self.text}\n~~~~\n\n</details>"


def show_source(thing: Callable[..., Any] | type, *, numbered: bool = False) -> Source:
    """Show the Python source of a labkit function or class, as installed.

    ``numbered`` puts before each line its number in the file.
    """
    lines, first = inspect.getsourcelines(thing)
    if numbered:
        lines = [f"{number:4}  {line}" for number, line in enumerate(lines, first)]
    return Source("".join(lines).rstrip(), f"{thing.__module__}.{thing.__qualname__}")
