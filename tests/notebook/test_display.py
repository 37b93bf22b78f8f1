"""Sources on a page: in the colours of the theme, and readable where there is no theme."""

import re

from workbook.notebook.display import Source

JUPYTERS = re.compile(r"var\(--jp-[a-z0-9-]+,#[0-9a-f]{6}\)")


def test_every_colour_is_the_themes_and_has_one_for_pages_without_a_theme():
    text = "class A:\n    def f(self):\n        # <why>\n        return 'text', None, 1 in 2"
    page = Source(text, "a")._repr_html_()
    assert "&lt;why&gt;" in page
    assert "background" not in page
    colours = re.findall(r"color: ([^;\"]+)", page)
    assert all(JUPYTERS.fullmatch(colour) for colour in colours)
    found = set(re.findall(r",#([0-9a-f]{6})\)", page))
    assert len(found) == 4
    for colour in found:  # readable on white
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5, colour


def luminance(colour):
    """The relative luminance of the Web Content Accessibility Guidelines, 0 to 1."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4))
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
