import base64
import functools
import io
import re
from concurrent.futures import ThreadPoolExecutor

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from parts import RUN, TRACE, UPDATES
from PIL import Image

from labkit.costs.pipeline_timeline import predicted_slots
from labkit.engine.tracing import Span, Trace
from labkit.schedules.pipeline import Action
from workbook import plots
from workbook.plots.palette import styles_of

CURVES = {"tree": {2**10: 1e-5, 2**20: 1e-2}, "ring": {2**10: 1e-4, 2**20: [1e-3, 2e-3]}}
STREAM = [Action("forward", 0), Action("backward", 0)]
STAGE = Trace.merge([[Span(0, "forward", 0, 1), Span(0, "backward", 1, 3)]])
MICRO = [{"schedule": "gpipe", "micro_batches": m, "step_s": [m, m + 1]} for m in (1, 2)]
MICRO = [row | {"model_s": 1.0} for row in MICRO]

MAKE_FIGURE = {
    "timeline": lambda: plots.timeline(TRACE),
    "timeline_model": lambda: plots.timeline(TRACE, model=True),
    "ring_steps": lambda: plots.ring_steps(plots.ring_states(3), title="Ring"),
    "ring_step": lambda: plots.ring_step(2, 3),
    "bucket_overlap": lambda: plots.bucket_overlap(25, 4),
    "staleness_histogram": lambda: plots.staleness_histogram(UPDATES, bound=5),
    "staleness_model": lambda: plots.staleness_model(3, 4, 5),
    "learning_curves": lambda: plots.learning_curves({"ring": RUN}),
    "bars": lambda: plots.bars(
        {"ring": {"measured": 1, "predicted": 2}}, quantity="time", unit="s"
    ),
    "pipeline_timetable": lambda: plots.pipeline_timetable(predicted_slots([STREAM], [1], [2])),
    "pipeline_timeline": lambda: plots.pipeline_timeline(STAGE, [STREAM]),
    "step_by_micro_batches": lambda: plots.step_by_micro_batches(MICRO),
    "communication_time": lambda: plots.communication_time(
        {"cut 5, forward": {1: [1e-3], 4: [4e-3]}}
    ),
    "size_curves": lambda: plots.size_curves(CURVES, {"ring": {2**10: 1e-4}}, crossover=2**15),
}


@functools.cache
def figure_of(name):
    return MAKE_FIGURE[name]()


@pytest.mark.parametrize("name", MAKE_FIGURE)
class TestEveryFigure:
    def test_has_picture_alt_text_with_numbers_and_a_caption(self, name):
        figure = figure_of(name)
        found = re.fullmatch(
            r'<figure [^>]*><img alt="([^"]+)" src="data:image/png;base64,([^"]+)" '
            r'width="(\d+)"[^>]*><figcaption [^>]*>(.+)</figcaption><style>.+</style></figure>',
            figure._repr_html_(),
        )
        assert base64.b64decode(found[2]).startswith(b"\x89PNG")
        assert 400 <= int(found[3]) <= 900
        assert re.search(r"\d", figure.alt)
        assert figure.alt.endswith(".")
        assert figure.caption.endswith(".")
        assert "  " not in figure.alt + figure.caption
        assert repr(figure) == f"[figure] {figure.alt}"

    def test_is_readable_on_white_and_its_axes_are_named(self, name):
        figure = figure_of(name)
        picture = Image.open(io.BytesIO(figure.png())).convert("RGB")
        assert picture.getpixel((1, 1)) == (255, 255, 255)
        sizes = [t.get_fontsize() for t in figure.figure.findobj(mpl.text.Text) if t.get_text()]
        assert min(sizes) >= 10
        axes = [axes for axes in figure.figure.axes if axes.axison]
        names = [a.get_xlabel() + a.get_ylabel() for a in axes]
        assert any(names)
        ticks = [label.get_text() for a in axes for label in a.get_yticklabels()]
        if "ring" not in name:
            assert any("(" in one for one in names) or ticks[-1].endswith("s"), "no unit"


class TestCaptionedFigure:
    def test_alt_and_caption_are_escaped(self):
        html = plots.CaptionedFigure(Figure(), alt='a "quoted" <b>', caption="x < y & z").html()
        assert 'alt="a &quot;quoted&quot; &lt;b&gt;"' in html
        assert "x &lt; y &amp; z" in html

    def test_saves_png_and_svg_whole_and_nothing_else(self, tmp_path):
        figure = plots.timeline(TRACE)
        assert figure.save(tmp_path / "a.png").read_bytes() == figure.png()
        assert "<svg" in figure.save(tmp_path / "a.svg").read_text(encoding="utf-8")
        with pytest.raises(ValueError, match="bmx"):
            figure.save(tmp_path / "a.bmx")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]

    def test_the_notebooks_style_changes_nothing_and_stays(self):
        plain = plots.timeline(TRACE).png()
        with mpl.rc_context({"axes.facecolor": "black", "font.size": 3, "hatch.color": "red"}):
            assert plots.timeline(TRACE).png() == plain
            assert mpl.rcParams["font.size"] == 3

    def test_threads_draw_one_after_another(self):
        before = dict(mpl.rcParams)
        with ThreadPoolExecutor(4) as pool:
            drawn = set(pool.map(lambda _: plots.ring_step(2, 3).png(), range(8)))
        assert drawn == {plots.ring_step(2, 3).png()}
        assert dict(mpl.rcParams) == before

    def test_fills_keep_their_exact_colors(self):
        picture = Image.open(io.BytesIO(plots.timeline(TRACE).png())).convert("RGB")
        colors = {color for _, color in picture.getcolors(2**24)}
        assert {(255, 255, 255), (0x00, 0x9E, 0x73), (0xD5, 0x5E, 0x00)} <= colors


def test_each_meaning_has_a_look_of_its_own_that_does_not_depend_on_others():
    looks = {(s.color, s.hatch) for s in styles_of([*plots.STYLES, *"abcdef"]).values()}
    assert len(looks) == len(plots.STYLES) + 6
    assert plots.STYLES["compute"].model.hatch not in {hatch for _, hatch in looks}
    assert styles_of(["wait", "compute"])["wait"] == styles_of(["wait"])["wait"]
