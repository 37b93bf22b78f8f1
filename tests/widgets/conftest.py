import pytest

from workbook import plots
from workbook.widgets.explorer import Explorer


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """What is shown is told by its alt text and caption; tests/plots look at the pictures."""
    monkeypatch.setattr(plots.CaptionedFigure, "png", lambda figure: b"a picture")


@pytest.fixture(autouse=True)
def _nothing_ahead(request, monkeypatch):
    """What is drawn is only what is shown, unless a test is about what is drawn ahead."""
    if "ahead" not in request.node.name:
        monkeypatch.setattr(Explorer, "_next", lambda *_: iter(()))
