"""The site that ``make html`` builds: no link is broken, and no page needs the network."""

import os
import re
import subprocess
from collections import defaultdict
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".venv-site"
# What a browser loads by itself; it asks before it follows an <a>.
LOADED = {"src", "srcset", "poster", "data"}
# A URL that it would load from within a style sheet.
FROM_CSS = re.compile(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//")

pytestmark = pytest.mark.more


class Page(HTMLParser):
    """The links of a page, what it loads, its ids, and its images without alternative text."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.loads, self.ids, self.bare = [], [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = defaultdict(str, {name: value or "" for name, value in attributes})
        self.ids |= {given["id"], given["name"]}
        self.loads += [given[name] for name in LOADED & given.keys() if tag != "math"]
        if given["href"]:
            (self.loads if tag == "link" else self.links).append(given["href"])
        if tag == "img" and not given["alt"].strip():
            self.bare.append(given["src"][:60])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the site, built as ``make html`` builds it: a warning ends the build."""
    if not (SITE / ".ready").is_file():
        pytest.skip("make html has not made .venv-site here")
    out = tmp_path_factory.mktemp("site")
    words = [SITE / "bin" / "sphinx-build", "-W", "--keep-going", "-q", "-c", "tools/site"]
    done = subprocess.run([*words, ".", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_links_lead_somewhere_and_nothing_is_loaded_from_the_network(site):
    read = cache(Page)
    wrong = []
    # (The theme's static files have a template among them.)
    for path in sorted({*site.rglob("*.html")} - {*site.glob("_static/*")}):
        page, here = read(path), path.relative_to(site)
        wrong += [f"{here}: an image has no alt text: {src}" for src in page.bare]
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    wrong.append(f"{here} loads {link}")
                continue
            where = path.parent / unquote(parts.path) if parts.path else path
            target = Path(os.path.normpath(where))
            if not target.is_file():
                wrong.append(f"{here} leads to {link}")
            elif target.suffix == ".html" and unquote(parts.fragment) not in read(target).ids | {
                ""
            }:
                wrong.append(f"{here} leads to {link}: no such place")
    wrong += [str(path) for path in site.rglob("*.css") if FROM_CSS.search(path.read_text())]
    assert not wrong, "\n".join(wrong[:40])


def test_every_page_of_the_course_and_the_reference_can_be_found(site):
    index = (site / "searchindex.js").read_text()
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        assert f"notebooks/{path.stem}" in index
        assert f"notebooks/{path.stem}.html" in (site / "index.html").read_text()
    assert "<math" in (site / "notebooks" / "06_ring_all_reduce.html").read_text()
    reference = (site / "build/api/labkit/index.html").read_text()
    assert 'id="labkit.run"' in reference
