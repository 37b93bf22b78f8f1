import pytest

from labkit import plots


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """What is shown is told by its alt text and caption; tests/plots look at the pictures."""
    monkeypatch.setattr(plots.CaptionedFigure, "png", lambda figure: b"a picture")
