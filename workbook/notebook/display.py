"""Show labkit's source code in a notebook, so that the page shows the code that runs."""

import inspect
from collections.abc import Callable
from typing import Any

# The colours of JupyterLab's theme, light or dark; a page without a theme has the second of each.
# Only colours that are readable on both (4.5:1) are here; all other code has the colour of text.
_COLOURS = {
    "Keyword": "bold var(--jp-mirror-editor-keyword-color,#008000)",
    "Keyword.Constant": "nobold",
    "Operator.Word": "bold var(--jp-mirror-editor-keyword-color,#008000)",
    "Literal.String": "var(--jp-mirror-editor-string-color,#ba2121)",
    "Comment": "italic var(--jp-content-font-color2,#595959)",
    "Name.Function": "var(--jp-mirror-editor-def-color,#0000ff)",
    "Name.Class": "bold var(--jp-mirror-editor-def-color,#0000ff)",
}


class Source:
    """The source of a function or class, highlighted in a notebook, plain text elsewhere."""

    def __init__(self, text: str, where: str):
        self.text, self.where = text, where

    def __repr__(self) -> str:
        return f"# {self.where}\n{self.text}"

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer
        from pygments.style import Style
        from pygments.token import string_to_tokentype

        looks = {string_to_tokentype(name): look for name, look in _COLOURS.items()}
        theme = type("Theme", (Style,), {"styles": looks})
        options = {"style": theme, "nobackground": True, "noclasses": True}
        formatter = HtmlFormatter(prestyles="font-family: monospace", **options)
        body = highlight(self.text, PythonLexer(), formatter)
        return f"<details open><summary><code>{self.where}</code></summary>{body}</details>"


def show_source(thing: Callable[..., Any] | type) -> Source:
    """Show the Python source of a labkit function or class, as installed.

    Raises:
        OSError, TypeError: it has none, for example because it is written in C.
    """
    where = f"{thing.__module__}.{thing.__qualname__}"
    return Source(inspect.getsource(thing), where)
