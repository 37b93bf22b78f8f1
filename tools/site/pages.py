"""What the site needs beside its tools: its contents, links to headings, and maths."""

import re
import shutil
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
PAGES = [f"notebooks/{path.stem}" for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
DOCUMENTS = ["docs/command_line", "docs/clients", "docs/hardware"]
DOCUMENTS += ["notebooks/scripts/project/README", "labkit/workload/data/README"]
DOCUMENTS += ["CONTRIBUTING", "CHANGELOG", "SECURITY"]
CONTENTS = {"Course": PAGES, "Documents": DOCUMENTS, "Reference": ["build/api/labkit/index"]}


def slug(heading: str) -> str:
    """The address of a heading, as Jupyter makes it."""
    return heading.replace("`", "").replace(" ", "-")


def add_contents(app, name: str, source: list[str]) -> None:
    """Add what the navigation shows to README, where the text does not show it."""
    for caption, names in CONTENTS.items() if name == app.config.root_doc else ():
        lines = "\n".join(names)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def keep_drawings(app, what, name, obj, options, lines: list[str]) -> None:
    """In a docstring an indented block after an empty line is a drawing, or code."""
    for number in range(len(lines) - 1, 1, -1):
        above, between, line = lines[number - 2 : number + 1]
        if line.startswith("    ") and not between and above and not above.startswith(" "):
            lines[number:number] = ["::", ""]


def lead_to_pages(app, name: str, template: str, context: dict, doctree) -> None:
    """The links in stored outputs are to notebooks, and may be older than the headings there."""
    if body := context.get("body"):
        context["body"] = re.sub(r'(href="\d\d_\w+)\.ipynb(#[^"]*)?"', r'\1.html"', body)


def maths(translator, node) -> None:
    """MathML, which browsers draw themselves, in place of a script from the network."""
    display = "block" if node.tagname == "math_block" else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise SkipNode


def add_index(app, exception: Exception | None) -> None:
    """A folder opens with its index.html: that is README."""
    if exception is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app) -> dict[str, bool]:
    app.connect("source-read", add_contents)
    app.connect("html-page-context", lead_to_pages)
    app.connect("build-finished", add_index)
    # Before napoleon, which indents.
    app.connect("autodoc-process-docstring", keep_drawings, priority=400)
    app.add_html_math_renderer("mathml", (maths, None), (maths, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
