"""What all explorers have in common."""

import base64
import queue

import ipywidgets
import pytest
from matplotlib.figure import Figure
from shown import alt_of, drawings
from splits import LINK, PROFILE

from workbook import plots, widgets
from workbook.widgets import kept
from workbook.widgets.explorer import Explorer

EXPLORERS = {
    "ring": lambda: widgets.ring_stepper(world_size=4),
    "staleness": lambda: widgets.staleness_explorer(workers=3, factor=4),
    "buckets": lambda: widgets.bucket_explorer(25),
    "split": lambda: widgets.split_explorer(PROFILE, LINK, split_points=(2,), picture=False),
}


@pytest.fixture(params=EXPLORERS)
def make(request):
    return EXPLORERS[request.param]


@pytest.fixture
def explorer(make):
    made = make()
    yield made
    made.close()


def sliders_of(explorer):
    """The sliders with numbers, wherever they stand."""
    rows = [getattr(child, "children", (child,)) for child in explorer.children]
    return [part for row in rows for part in row if isinstance(part, ipywidgets.IntSlider)]


def test_screen_readers_are_told_of_a_new_caption(explorer):
    assert '<figcaption role="status" aria-live="polite"' in explorer.view.value


@pytest.mark.slow
def test_the_picture_is_the_figures(make, monkeypatch):
    monkeypatch.undo()
    explorer = make()
    picture = explorer.draw(*explorer.chosen()).png()
    assert base64.b64encode(picture).decode() in explorer.view.value
    explorer.close()


def test_what_was_seen_is_not_drawn_again(explorer):
    slider, first = sliders_of(explorer)[0], explorer.view.value
    drawn, start = drawings(explorer), slider.value
    slider.value = start + 1
    assert len(drawn) == 1
    assert explorer.view.value != first
    slider.value = start
    assert explorer.view.value == first
    slider.value = start + 1
    assert len(drawn) == 1


def test_the_next_moves_are_drawn_ahead():
    drawn = queue.Queue()

    def draw(size, kind):
        drawn.put((size, kind))
        return plots.CaptionedFigure(
            Figure(), alt=f"a figure of size {size} and {kind}", caption="Empty."
        )

    size, kind = ipywidgets.IntSlider(5, 0, 7), ipywidgets.Dropdown(options=["a", "b"])
    explorer = Explorer(draw, size, kind)
    assert drawn.get() == (5, "a")
    assert drawn.empty(), "nothing before the first move"
    size.value = 6
    found = [drawn.get(timeout=10) for _ in range(3)]
    assert found == [(6, "a"), (7, "a"), (6, "b")], "(5, a) has been drawn"
    shown = explorer.view.value
    assert "of size 6 and a" in shown
    kind.value = "b"
    assert "of size 6 and b" in explorer.view.value
    explorer.close()


def test_it_is_read_as_text_where_there_is_no_browser(explorer):
    text = repr(explorer)
    assert text.startswith("[sliders")
    assert text.endswith(explorer.draw(*explorer.chosen()).caption)
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == text
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_closed_it_leaves_nothing(make):
    before = set(ipywidgets.widgets.widget._instances)
    explorer = make()
    slider, shown = sliders_of(explorer)[0], explorer.view.value
    explorer.close()
    assert set(ipywidgets.widgets.widget._instances) == before
    slider.value += 1
    assert explorer.view.value == shown
    explorer.close()  # a second time does no harm


def test_it_keeps_its_state_when_its_cell_is_run_again(make, monkeypatch):
    monkeypatch.setattr(kept, "_cell", lambda: "a cell")
    monkeypatch.setattr(kept, "_STATES", {})
    first = make()
    slider = sliders_of(first)[-1]
    slider.value += 1
    again = make()
    assert again.chosen() == first.chosen()
    assert alt_of(again) == alt_of(first)
    monkeypatch.setattr(kept, "_cell", lambda: "another cell")
    other = make()
    assert other.chosen() != first.chosen()
    for explorer in (first, again, other):
        explorer.close()


def test_two_do_not_answer_to_each_other(make):
    one, other = make(), make()
    shown = alt_of(one)
    sliders_of(other)[0].value += 1
    assert alt_of(one) == shown != alt_of(other)
    one.close()
    other.close()
