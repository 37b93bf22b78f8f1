import base64
import functools
import io
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from labkit import plots
from labkit.costs.async_run import simulate
from labkit.costs.pipeline_timeline import predicted_slots
from labkit.plots.buckets import example_step
from labkit.plots.figure import styles_of
from labkit.schedules.pipeline import Action
from labkit.schedules.ring import owned_chunk, ring_all_reduce
from labkit.trace import Span, Trace
from labkit.units import format_seconds

SPANS = [
    Span(0, "compute", 0.000, 0.004),
    Span(0, "communicate", 0.004, 0.005, num_bytes=8, peer=1),
    Span(1, "compute", 0.000, 0.001),
    Span(1, "wait", 0.001, 0.004, peer=0),
    Span(1, "communicate", 0.004, 0.005, num_bytes=8, peer=0),
]
TRACE = Trace.merge([SPANS])
EPOCHS = [
    {"loss": 2.0, "test_accuracy": 0.25, "seconds": 3.0},
    {"loss": 1.0, "test_accuracy": 0.75, "seconds": 2.0},
]
RING = plots.ring_states(3)[1]
CURVES = {"tree": {2**10: 1e-5, 2**20: 1e-2}, "ring": {2**10: 1e-4, 2**20: [1e-3, 2e-3]}}


def legend_of(figure):
    (legend,) = figure.figure.legends
    return [text.get_text() for text in legend.get_texts()]


def bars_of(figure):
    """[left, right, top, bottom] of each span's bar."""
    (collection,) = [c for c in figure.figure.axes[0].collections if c.get_gid() == "spans"]
    boxes = [path.get_extents() for path in collection.get_paths()]
    return np.array([(box.x0, box.x1, box.y0, box.y1) for box in boxes])


def heights_of(figure):
    """By series, the heights of its bars."""
    containers = figure.figure.axes[0].containers
    found = {}
    for container in containers:
        if hasattr(container, "patches"):
            found.setdefault(container.get_label(), []).extend(
                patch.get_height() for patch in container.patches
            )
    return found


UPDATES = [[1, 0], [2, 1], [1, 1], [3, 3], [1, 0]]
HOP = {"placement": "2 devices", "cut": 5, "direction": "activation", "batch_size": 16}
HOP |= {"num_bytes": 2**20, "seconds": [1e-3, 2e-3], "model_s": 1e-3}
STEPS = [{"split_points": [k], "predicted_s": k, "measured_s": [k, k + 1]} for k in (1, 2)]
STREAM = [Action("forward", 0), Action("backward", 0)]
STAGE = Trace.merge([[Span(0, "forward", 0, 1), Span(0, "backward", 1, 3)]])
MICRO = [{"schedule": "gpipe", "micro_batches": m, "step_s": [m, m + 1]} for m in (1, 2)]

MAKE_FIGURE = {
    "timeline": lambda: plots.timeline(TRACE),
    "timeline_model": lambda: plots.timeline(TRACE, model=True),
    "phases": lambda: plots.phases(TRACE),
    "phases_model": lambda: plots.phases({"compute": 1.0}, model=True),
    "ring_grid": lambda: plots.ring_grid(RING.contributions, messages=RING.messages),
    "ring_steps": lambda: plots.ring_steps(plots.ring_states(3), title="Ring"),
    "ring_step": lambda: plots.ring_step(2, 3),
    "bucket_overlap": lambda: plots.bucket_overlap(25, 4),
    "staleness_histogram": lambda: plots.staleness_histogram(UPDATES, bound=5),
    "staleness_model": lambda: plots.staleness_model(3, 4, 5),
    "learning_curves": lambda: plots.learning_curves({"single": EPOCHS}),
    "bars": lambda: plots.bars({"ring": {"measured": 1, "model": 2}}, quantity="time", unit="s"),
    "communication_time": lambda: plots.communication_time([HOP]),
    "split_scatter": lambda: plots.split_scatter(STEPS),
    "pipeline_timetable": lambda: plots.pipeline_timetable(predicted_slots([STREAM], [1], [2])),
    "pipeline_timeline": lambda: plots.pipeline_timeline(STAGE, [STREAM]),
    "step_by_micro_batches": lambda: plots.step_by_micro_batches(MICRO),
    "size_curves": lambda: plots.size_curves(CURVES, {"ring": {2**10: 1e-4}}, crossover=2**15),
}


@functools.cache
def figure_of(name):
    return MAKE_FIGURE[name]()


@pytest.mark.parametrize("name", MAKE_FIGURE)
class TestEveryFigure:
    def test_has_alt_text_with_numbers_and_a_caption(self, name):
        figure = figure_of(name)
        assert len(figure.alt) >= 15
        assert re.search(r"\d", figure.alt)
        assert figure.alt.endswith(".")
        assert figure.caption.endswith(".")
        assert "  " not in figure.alt + figure.caption

    def test_html_holds_picture_alt_and_caption(self, name):
        figure = figure_of(name)
        found = re.fullmatch(
            r'<figure [^>]*><img alt="([^"]+)" src="data:image/png;base64,([^"]+)" [^>]*>'
            r"<figcaption [^>]*>(.+)</figcaption></figure>",
            figure._repr_html_(),
        )
        assert found
        assert len(found[1]) >= 15
        assert base64.b64decode(found[2]).startswith(b"\x89PNG")

    def test_is_readable_on_a_page_and_on_white(self, name):
        figure = figure_of(name)
        width = int(re.search(r'width="(\d+)"', figure.html())[1])
        assert 400 <= width <= 900
        picture = Image.open(io.BytesIO(figure.png())).convert("RGB")
        assert picture.getpixel((1, 1)) == (255, 255, 255)
        sizes = [t.get_fontsize() for t in figure.figure.findobj(mpl.text.Text) if t.get_text()]
        assert min(sizes) >= 10

    def test_axes_are_named(self, name):
        axes = [axes for axes in figure_of(name).figure.axes if axes.axison]
        assert any(a.get_xlabel() or a.get_ylabel() for a in axes)
        if "ring" not in name:
            assert any("(" in a.get_xlabel() + a.get_ylabel() for a in axes)

    def test_text_for_terminals_is_short_and_in_words(self, name):
        figure = figure_of(name)
        assert repr(figure) == f"[figure] {figure.alt}"


class TestCaptionedFigure:
    def test_alt_and_caption_are_escaped(self):
        alt = 'a "quoted" <b> sentence'
        html = plots.CaptionedFigure(Figure(), alt=alt, caption="x < y & z").html()
        assert 'alt="a &quot;quoted&quot; &lt;b&gt; sentence"' in html
        assert "x &lt; y &amp; z" in html

    def test_short_alt_or_no_caption_is_refused(self):
        with pytest.raises(ValueError, match="alt text"):
            plots.CaptionedFigure(Figure(), alt="a plot", caption="Fine.")
        with pytest.raises(ValueError, match="caption"):
            plots.CaptionedFigure(Figure(), alt="a sentence that is long", caption=" ")

    def test_saves_png_and_svg_whole(self, tmp_path):
        figure = plots.phases(TRACE)
        assert figure.save(tmp_path / "a.png").read_bytes() == figure.png()
        assert "<svg" in figure.save(tmp_path / "a.svg").read_text(encoding="utf-8")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]

    def test_an_unknown_suffix_is_refused_before_anything_is_written(self, tmp_path):
        with pytest.raises(ValueError, match=r"a\.pdf.*\.png or \.svg"):
            plots.phases(TRACE).save(tmp_path / "a.pdf")
        assert not list(tmp_path.iterdir())

    def test_equal_data_gives_equal_bytes(self):
        assert plots.timeline(TRACE).png() == plots.timeline(TRACE).png()

    def test_the_notebooks_style_changes_nothing_and_stays(self):
        plain = plots.timeline(TRACE).png()
        with mpl.rc_context({"axes.facecolor": "black", "font.size": 3, "hatch.color": "red"}):
            assert plots.timeline(TRACE).png() == plain
            assert mpl.rcParams["font.size"] == 3

    def test_threads_draw_one_after_another(self):
        before = dict(mpl.rcParams)
        with ThreadPoolExecutor(4) as pool:
            drawn = list(pool.map(lambda _: plots.ring_step(2, 3).png(), range(8)))
        assert set(drawn) == {plots.ring_step(2, 3).png()}
        assert dict(mpl.rcParams) == before

    def test_drawing_leaves_the_figure_its_resolution(self):
        figure = plots.phases(TRACE)
        before = figure.figure.get_dpi()
        figure.png()
        assert figure.figure.get_dpi() == before

    def test_pyplot_is_not_touched(self):
        code = (
            "import sys, labkit\n"
            "assert 'matplotlib' not in sys.modules, 'labkit alone must import fast'\n"
            "labkit.plots.phases({'compute': 1.0}).html()\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_fills_keep_their_exact_colors(self):
        picture = Image.open(io.BytesIO(plots.timeline(TRACE).png())).convert("RGB")
        colors = {color for _, color in picture.getcolors(2**24)}
        assert {(255, 255, 255), (0x00, 0x9E, 0x73), (0xD5, 0x5E, 0x00)} <= colors


class TestStyles:
    def test_each_meaning_has_a_look_of_its_own(self):
        looks = {(style.color, style.hatch) for style in plots.STYLES.values()}
        assert len(looks) == len(plots.STYLES)
        assert len({style.hatch for style in plots.STYLES.values()}) >= 7

    def test_a_look_does_not_depend_on_what_else_is_there(self):
        assert styles_of(["wait", "compute"])["wait"] == styles_of(["wait"])["wait"]

    def test_unknown_phases_get_looks_apart_from_the_known(self):
        styles = styles_of([*plots.STYLES, "scatter", "gather"])
        assert len({(style.color, style.hatch) for style in styles.values()}) == len(styles)

    def test_predictions_have_a_hatch_that_no_measurement_has(self):
        hatches = {style.hatch for style in styles_of([*plots.STYLES, *"abcdef"]).values()}
        assert plots.STYLES["compute"].model.hatch not in hatches


class TestTimeline:
    def test_bars_are_the_spans_with_rank_0_on_top(self):
        bars = bars_of(plots.timeline(TRACE))
        expected = [(1e3 * span.start_s, 1e3 * span.end_s, span.rank) for span in TRACE.spans]
        lanes = bars[:, 2:].mean(axis=1)
        np.testing.assert_allclose(np.column_stack([bars[:, :2], lanes]), expected, atol=1e-9)
        bottom, top = plots.timeline(TRACE).figure.axes[0].get_ylim()
        assert top < bottom

    def test_bars_have_the_color_of_their_kind(self):
        (bars,) = [
            c for c in plots.timeline(TRACE).figure.axes[0].collections if c.get_gid() == "spans"
        ]
        colors = [to_hex(color).upper() for color in bars.get_facecolors()]
        assert colors == [plots.STYLES[span.kind].color for span in TRACE.spans]

    def test_legend_holds_the_kinds_present_only(self):
        assert legend_of(plots.timeline(TRACE)) == ["compute", "communicate", "wait"]

    @pytest.mark.parametrize(("factor", "unit"), [(1e-3, "µs"), (1, "ms"), (1000, "s")])
    def test_unit_fits_the_range(self, factor, unit):
        spans = [Span(s.rank, s.kind, factor * s.start_s, factor * s.end_s) for s in SPANS]
        axes = plots.timeline(Trace.merge([spans])).figure.axes[0]
        assert axes.get_xlabel() == f"time since the start ({unit})"
        assert axes.get_xlim()[1] == pytest.approx(5, rel=0.01)

    def test_alt_and_caption_say_the_shares(self):
        figure = plots.timeline(TRACE)
        assert "2 ranks over 5 ms" in figure.alt
        assert "rank 1: compute 20%, communicate 20%, wait 60%" in figure.alt
        assert "take 80% of 5 ms on rank 1 and 20% on rank 0." in figure.caption
        assert "Mean over the ranks: compute 50%" in figure.caption
        assert "Blank" not in figure.caption

    def test_time_outside_spans_is_named(self):
        spans = [Span(0, "compute", 0, 1), Span(1, "compute", 0.5, 1)]
        caption = plots.timeline(Trace.merge([spans])).caption
        assert "None of the 1 s goes to communication or waiting" in caption
        assert "Blank, 25%, is time outside any span." in caption

    def test_window_clips_shares_and_axis_but_no_bar(self):
        figure = plots.timeline(TRACE, start_s=0.003, end_s=0.005, ranks=[1])
        assert "rank 1: communicate 50%, wait 50%" in figure.alt
        assert bars_of(figure)[:, :2].tolist() == [[1.0, 4.0], [4.0, 5.0]]
        assert figure.figure.axes[0].get_xlim() == pytest.approx((3, 5), abs=0.02)

    def test_accepts_a_result_with_a_trace(self):
        assert plots.timeline(SimpleNamespace(trace=TRACE)).alt == plots.timeline(TRACE).alt

    def test_spans_out_of_order_are_fine(self):
        reverse = Trace(tuple(reversed(TRACE.spans)))
        assert plots.timeline(reverse).alt == plots.timeline(TRACE).alt

    def test_a_prediction_says_model(self):
        figure = plots.timeline(TRACE, model=True)
        assert legend_of(figure)[0] == "compute (model)"
        assert figure.alt.startswith("Predicted")
        hatches = {c.get_hatch() for c in figure.figure.axes[0].collections} - {None}
        assert hatches == {plots.STYLES["compute"].model.hatch}

    def test_many_ranks_stay_in_bounds(self):
        trace = Trace.merge([[Span(rank, "compute", 0, 1) for rank in range(100)]])
        figure = plots.timeline(trace)
        assert figure.figure.get_figheight() < 10
        assert len(figure.figure.axes[0].get_yticks()) <= 34
        assert len(figure.alt) < 200

    def test_20_000_spans_are_drawn_without_a_hatch_each(self):
        spans = [
            Span(rank, ("compute", "communicate", "wait")[i % 3], i * 1e-4, (i + 1) * 1e-4)
            for rank in range(4)
            for i in range(5000)
        ]
        figure = plots.timeline(Trace.merge([spans]))
        assert len(bars_of(figure)) == 20_000
        assert len(figure.figure.axes[0].collections) == 1
        assert "20,000 spans are narrower than a pixel" in figure.caption
        assert figure.png()

    def test_another_thread_is_a_thin_lane_under_its_rank(self):
        spans = [
            Span(0, "compute", 0, 3),
            Span(0, "all_reduce", 1, 4, lane=1),
            Span(0, "wait", 3, 4),
            Span(1, "compute", 0, 4),
        ]
        figure = plots.timeline(Trace.merge([spans]))
        main, other, waiting, beside = bars_of(figure)[[0, 2, 3, 1]]
        # Nothing of a rank is drawn over anything else, and the other thread's bar is thinner.
        assert main[3] == waiting[3] < other[2] < other[3] < beside[2]
        assert other[3] - other[2] < (main[3] - main[2]) / 2
        assert "rank 0: compute 75%, wait 25%; rank 1: compute 100%" in figure.alt
        assert "in threads beside the main one, rank 0: all_reduce 75%" in figure.alt
        assert "take 25% of 4 s on rank 0" in figure.caption
        assert "The thin lane under each rank" in figure.caption

    def test_an_empty_trace_names_the_next_step(self):
        with pytest.raises(ValueError, match=r"no spans.*comm\.span\(\"compute\"\)"):
            plots.timeline(Trace())

    def test_wrong_inputs_are_refused_with_the_numbers(self):
        with pytest.raises(ValueError, match=r"ranks \[7\].*has ranks \[0, 1\]"):
            plots.timeline(TRACE, ranks=[7])
        with pytest.raises(ValueError, match=r"start_s=3 .*runs from 0 to 0\.005 s"):
            plots.timeline(TRACE, start_s=3)
        with pytest.raises(ValueError, match="no span lies between"):
            plots.timeline(TRACE, start_s=0.004, end_s=0.001)
        with pytest.raises(ValueError, match=r"got list.*labkit\.run"):
            plots.timeline([1, 2])


class TestStaleness:
    def test_bars_are_the_updates_stacked_by_worker(self):
        axes = plots.staleness_histogram(UPDATES, bound=5).figure.axes[0]
        bars = [(round(b.get_x() + 0.4), b.get_y(), b.get_height()) for b in axes.patches]
        first, second, third = bars[:6], bars[6:12], bars[12:]
        assert [height for _, _, height in first] == [2, 1, 0, 0, 0, 0]
        assert second[1] == (1, 1, 1), "the second worker's update stands on the first one's"
        assert third[3] == (3, 0, 1)
        assert axes.lines[0].get_xdata() == [5.5, 5.5], "right of the last bar that is allowed"

    def test_alt_and_caption_hold_means_and_the_bound(self):
        figure = plots.staleness_histogram(UPDATES, bound=5)
        assert "worker 1: 3 updates, mean staleness 0.3, largest 1" in figure.alt
        assert figure.caption == (
            "Mean staleness 1.00 with 3 workers, largest 3; the bound was 5."
        )
        assert "no bound was set" in plots.staleness_histogram(UPDATES).caption

    def test_a_predicted_histogram_says_so(self):
        figure = plots.staleness_histogram(UPDATES, model=True)
        assert figure.alt.startswith("Predicted")
        assert figure.figure.axes[0].get_title(loc="left").endswith("(model)")
        assert all(bar.get_hatch() == "////" for bar in figure.figure.axes[0].patches)

    @pytest.mark.parametrize(("workers", "factor", "bound"), [(1, 1, None), (6, 8, 5), (2, 4, 3)])
    def test_the_model_is_the_simulators(self, workers, factor, bound):
        run = simulate(workers, factor=factor, bound=bound)
        figure = plots.staleness_model(workers, factor, bound)
        histogram = figure.figure.axes[1]
        assert sum(bar.get_height() for bar in histogram.patches) == len(run.updates)
        assert f"{len(run.updates)} gradients are applied" in figure.caption
        lanes = [text.get_text() for text in figure.figure.axes[0].get_yticklabels()]
        assert lanes == ["server", *(f"worker {w}" for w in range(1, workers + 1))]
        assert "(model)" in figure.figure.get_suptitle()

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no updates to draw"):
            plots.staleness_histogram([])
        with pytest.raises(ValueError, match="1 to 6 workers, got 7"):
            plots.staleness_model(7)
        with pytest.raises(ValueError, match="at most 1 cannot be kept with 3 workers"):
            plots.staleness_model(3, 4, 1)


class TestBucketOverlap:
    def test_the_words_are_the_models(self):
        step = example_step(25, 4, "10 Gb/s network")
        figure = plots.bucket_overlap(25, 4, "10 Gb/s network")
        assert f"{len(step.buckets)} all-reduces" in figure.caption
        assert format_seconds(step.exposed_s) in figure.caption
        assert format_seconds(step.exposed_s) in figure.alt
        assert figure.alt.startswith("Predicted")

    def test_bars_are_the_timetable(self):
        step = example_step(25, 4, "10 Gb/s network")
        axes = plots.bucket_overlap(25, 4, "10 Gb/s network").figure.axes[0]
        link = [bar for bar in axes.patches if round(bar.get_y() + 0.35) == 1]
        drawn = [(bar.get_x() / 1e3, (bar.get_x() + bar.get_width()) / 1e3) for bar in link]
        assert drawn == [pytest.approx((t.start_s, t.end_s)) for t in step.times]
        assert all(bar.get_hatch() for bar in axes.patches)

    def test_no_size_on_the_curve_beats_the_best(self):
        link = "10 Gb/s network"
        steps = {size: example_step(size, 4, link).step_s for size in plots.BUCKET_SIZES_MB}
        best = min(steps, key=steps.get)
        assert 0 < best < 25
        assert "No other size on the curve is faster" in plots.bucket_overlap(best, 4).caption
        assert f"With {best:g} MiB it would take" in plots.bucket_overlap(0, 4).caption

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((25, 1), "give a world_size from 2, got 1"),
            ((-1, 2), "bucket_mb must be 0"),
            ((25, 2, "pigeon"), "unknown link 'pigeon': choose one of shared memory"),
        ],
    )
    def test_wrong_inputs_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            plots.bucket_overlap(*arguments)


class TestPhases:
    def test_parts_are_the_seconds_by_kind(self):
        axes = plots.phases(TRACE).figure.axes[0]
        containers = {c.get_label() for c in axes.containers}
        assert containers == {"compute", "communicate", "wait"}
        by_rank = [
            sum(p.get_width() for p in axes.patches if round(p.get_y() + 0.36) == rank)
            for rank in (0, 1)
        ]
        assert by_rank == pytest.approx([5, 5])

    def test_bars_stand_end_to_end(self):
        row = [p for p in plots.phases({"compute": 3, "wait": 1}).figure.axes[0].patches]
        assert [(p.get_x(), p.get_width()) for p in row] == [(0, 3), (3, 1)]

    def test_takes_seconds_by_kind_and_by_name(self):
        figure = plots.phases({"ring": {"compute": 3, "wait": 1}, 2: {"compute": 2.0}})
        assert "ring 4 s, compute 75%, wait 25%; rank 2 2 s, compute 100%" in figure.alt
        assert "longest bar is ring (4 s), the shortest rank 2 (2 s)." in figure.caption
        labels = [tick.get_text() for tick in figure.figure.axes[0].get_yticklabels()]
        assert labels == ["ring", "rank 2"]

    def test_a_bar_without_time_is_fine(self):
        assert "idle" not in plots.phases({"busy": {"compute": 1}, "idle": {}}).alt

    @pytest.mark.parametrize("empty", [{}, {"compute": 0.0}, {0: {}}])
    def test_nothing_to_draw_names_the_next_step(self, empty):
        with pytest.raises(ValueError, match="nothing to draw: give what"):
            plots.phases(empty)

    def test_an_empty_trace_is_refused(self):
        with pytest.raises(ValueError, match="no spans"):
            plots.phases(Trace())


class TestRing:
    def test_states_start_with_own_parts_and_end_complete(self):
        states = plots.ring_states(4)
        assert len(states) == 2 * 3 + 1
        assert [state.complete for state in states] == [0, 0, 0, 4, 8, 12, 16]
        assert all(len(state.messages) == 4 for state in states[1:])

    def test_messages_carry_what_arrived(self):
        for before, after in zip(plots.ring_states(3), plots.ring_states(3)[1:]):
            for src, dst, chunk in after.messages:
                assert before.contributions[src][chunk] <= after.contributions[dst][chunk]

    def test_values_are_summed_as_the_contributions_say(self):
        states = plots.ring_states(2, [[1, 2], [10, 20]])
        assert states[0].values == [[1, 2], [10, 20]]
        assert states[-1].values == [[11, 22], [11, 22]]

    def test_cells_print_value_and_ranks(self):
        grid = plots.ring_grid([[{0}, {0, 1}], [{1}, {1}]], values=[[1, 22], [10, 20.5]])
        texts = [text.get_text() for text in grid.figure.axes[0].texts]
        assert texts == ["1", "0", "22", "all", "10", "1", "20.5", "1"]

    def test_cells_are_darker_with_more_ranks(self):
        contributions = [[{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]] + [[set()] * 4] * 3
        patches = plots.ring_grid(contributions).figure.axes[0].patches[:4]
        levels = [sum(patch.get_facecolor()[:3]) for patch in patches]
        assert levels == sorted(levels, reverse=True)
        assert len(set(levels)) == 4

    def test_messages_are_arrows_and_outlines(self):
        grid = plots.ring_grid([[{0}] * 2, [{0, 1}, {1}]], messages=[(0, 1, 0)])
        axes = grid.figure.axes[0]
        (arrow,) = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
        assert arrow.xy[1] == 1
        assert arrow.xyann[1] == 0
        assert len(axes.patches) == 4 + 1
        assert "just arrived" in legend_of(grid)

    def test_legend_names_the_states_present_only(self):
        assert legend_of(plots.ring_grid([[{0}, {0}], [{1}, {1}]])) == ["own part only"]
        assert legend_of(plots.ring_steps(plots.ring_states(2))) == [
            "own part only",
            "sum of all ranks",
            "just arrived",
        ]

    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_all_steps_fit_the_page(self, world_size):
        states = plots.ring_states(world_size)
        figure = plots.ring_steps(states)
        assert figure.figure.get_figwidth() <= 8.5
        drawn = [axes for axes in figure.figure.axes if axes.axison]
        assert [axes.get_title(loc="left") for axes in drawn] == [s.title for s in states]

    def test_texts_stay_inside_their_cells(self):
        values = [[1000 * rank + chunk for chunk in range(4)] for rank in range(4)]
        figure = plots.ring_steps(plots.ring_states(4, values)).figure
        figure.canvas.draw()
        for axes in [axes for axes in figure.axes if axes.axison]:
            cells = [patch.get_window_extent() for patch in axes.patches]
            for text in [text for text in axes.texts if text.get_text()]:
                box = text.get_window_extent()
                assert any(c.x0 <= box.x0 and box.x1 <= c.x1 for c in cells)

    def test_alt_and_caption_count(self):
        figure = plots.ring_steps(plots.ring_states(3))
        assert "3 ranks by 3 chunks in 5 states" in figure.alt
        assert "step 4: share_only, 9." in figure.alt
        assert "12 messages in all" in figure.caption
        assert "At the end 9 of 9 cells" in figure.caption

    def test_wrong_inputs_are_refused_with_the_numbers(self):
        with pytest.raises(ValueError, match="at least 2 ranks, got world_size 1"):
            plots.ring_states(1)
        with pytest.raises(ValueError, match="3 rows"):
            plots.ring_states(3, [[1, 2, 3]])
        with pytest.raises(ValueError, match="no states"):
            plots.ring_steps([])
        with pytest.raises(ValueError, match=r"lengths \[2, 1\]"):
            plots.ring_grid([[{0}, {0}], [{1}]])
        with pytest.raises(ValueError, match=r"lengths \[\]"):
            plots.ring_grid([])
        with pytest.raises(ValueError, match="values must be 1 rows of 1"):
            plots.ring_grid([[{0}]], values=[[1, 2]])
        with pytest.raises(ValueError, match=r"ranks \[5\].*0 to 1"):
            plots.ring_grid([[{0}], [{5}]])
        with pytest.raises(ValueError, match=r"chunks \[3\].*0 to 0"):
            plots.ring_grid([[{0}], [{1}]], messages=[(0, 1, 3)])


class TestRingStep:
    @pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
    def test_the_words_are_the_schedule(self, world_size):
        schedule = [list(ring_all_reduce(rank, world_size)) for rank in range(world_size)]
        last = 2 * (world_size - 1)
        for step in range(1, last + 1):
            words = plots.ring_words(step, world_size)
            moves = [rank_steps[step - 1] for rank_steps in schedule]
            assert words.startswith(f"Step {step} of {last}, {moves[0].phase}: rank 0 sends")
            assert words.count("sends") == world_size
            for rank, move in enumerate(moves):
                assert f"rank {rank} sends chunk {move.send_chunk} to rank {move.dst}" in words

    @pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
    def test_the_words_say_who_owns_what(self, world_size):
        halfway = plots.ring_words(world_size - 1, world_size)
        for rank in range(world_size):
            owned = owned_chunk(rank, world_size)
            assert re.search(rf"rank {rank} owns chunk {owned}[;.]", halfway)
        for step in range(world_size - 1):
            assert "owns" not in plots.ring_words(step, world_size)
        end = plots.ring_words(2 * (world_size - 1), world_size)
        assert end.endswith(f"Every rank now owns the complete sums of all {world_size} chunks.")

    def test_the_words_of_a_step_are_as_in_the_textbook(self):
        assert plots.ring_words(0, 3) == (
            "Start: each of 3 ranks holds its own numbers, and none has moved."
        )
        assert plots.ring_words(1, 3) == (
            "Step 1 of 4, share_reduce: rank 0 sends chunk 0 to rank 1, rank 1 sends chunk 1 to "
            "rank 2 and rank 2 sends chunk 2 to rank 0. Each adds what comes in. What came in is "
            "now a sum of 2 of 3 ranks; no chunk is complete."
        )
        assert plots.ring_words(3, 3).endswith(
            "Each copies what comes in. Complete now: rank 0 owns chunks 0 and 1; rank 1 owns "
            "chunks 1 and 2; rank 2 owns chunks 0 and 2."
        )

    def test_the_digits_of_a_number_are_the_ranks_in_it(self):
        axes = plots.ring_step(2, 4).figure.axes[0]
        texts = [text.get_text() for text in axes.texts if text.get_text()]
        assert texts[:8] == ["1", "0", "2", "0", "3303", "0,2,3", "4004", "0,3"]
        assert axes.get_title(loc="left") == "step 2 of 6: share_reduce"

    def test_alt_holds_the_numbers_and_the_caption_the_words(self):
        figure = plots.ring_step(2, 2, [[1, 2], [10, 20.5]])
        assert "By chunk: rank 0 holds 11, 22.5; rank 1 holds 11, 22.5." in figure.alt
        assert figure.alt.endswith("sum of all ranks: 4 of 4.")
        assert figure.caption.startswith(plots.ring_words(2, 2))

    @pytest.mark.parametrize("world_size", [2, 4, 6])
    def test_all_steps_have_one_size_and_one_legend(self, world_size):
        figures = [plots.ring_step(s, world_size) for s in range(2 * world_size - 1)]
        places = {tuple(f.figure.axes[0].get_position().bounds) for f in figures}
        assert len({tuple(f.figure.get_size_inches()) for f in figures} | places) == 2
        assert len({tuple(legend_of(figure)) for figure in figures}) == 1
        assert figures[0].figure.get_figwidth() <= 8.5

    @pytest.mark.parametrize(("step", "world_size"), [(1, 2), (3, 4), (4, 6), (7, 6)])
    def test_nothing_overlaps(self, step, world_size):
        figure = plots.ring_step(step, world_size).figure
        figure.draw_without_rendering()
        axes = figure.axes[0]
        cells = [patch.get_window_extent() for patch in axes.patches[: world_size**2]]
        arrows = [
            text.arrow_patch.get_window_extent() for text in axes.texts if not text.get_text()
        ]
        assert len(arrows) == world_size
        texts = [text.get_window_extent() for text in axes.texts if text.get_text()]
        for text in texts:
            assert any(c.x0 < text.x0 and text.x1 < c.x1 for c in cells)
            assert not any(text.overlaps(arrow) for arrow in arrows)
        (legend,) = figure.legends
        below = axes.xaxis.label.get_window_extent().y0
        assert legend.get_window_extent().y1 < below

    def test_a_step_that_is_not_there_is_refused_with_the_range(self):
        for step in (-1, 7, 1.5, "2"):
            with pytest.raises(ValueError, match=r"4 ranks has no step .*0 .* to 6"):
                plots.ring_step(step, 4)
        with pytest.raises(ValueError, match="at least 2 ranks"):
            plots.ring_step(0, 1)
        with pytest.raises(ValueError, match="3 rows"):
            plots.ring_step(0, 3, [[1]])


class TestLearningCurves:
    def test_draws_loss_and_accuracy_by_epoch_and_by_second(self):
        grid = plots.learning_curves({"single": EPOCHS}).figure.axes
        lines = [axes.lines[0].get_xydata().tolist() for axes in grid]
        assert lines == [
            [[1, 2], [2, 1]],
            [[3, 2], [5, 1]],
            [[1, 25], [2, 75]],
            [[3, 25], [5, 75]],
        ]

    def test_takes_results_and_names_each_run(self):
        runs = {"ring": SimpleNamespace(epochs=EPOCHS), "single": EPOCHS[:1]}
        figure = plots.learning_curves(runs)
        assert legend_of(figure) == ["ring", "single"]
        assert "ring ends at loss 1 and held-out accuracy 75.0% after 2 epochs" in figure.alt
        assert "Best held-out accuracy at the end: ring, 75.0%" in figure.caption
        assert "First to end: single, after 3 s" in figure.caption

    def test_runs_differ_in_marker_and_line_too(self):
        lines = plots.learning_curves(dict.fromkeys("abcdefg", EPOCHS)).figure.axes[0].lines
        assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 7

    def test_an_epoch_without_accuracy_is_a_gap(self):
        epochs = [EPOCHS[0] | {"test_accuracy": None}, EPOCHS[1]]
        figure = plots.learning_curves({"a": epochs})
        assert np.isnan(figure.figure.axes[2].lines[0].get_ydata()[0])
        assert figure.png()

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no runs"):
            plots.learning_curves({})
        with pytest.raises(ValueError, match="a has no epochs"):
            plots.learning_curves({"a": []})
        with pytest.raises(ValueError, match="a has epochs without test_accuracy, seconds"):
            plots.learning_curves({"a": [{"loss": 1}]})


class TestBars:
    def test_bars_are_medians_with_whiskers_over_all_repeats(self):
        figure = plots.bars(
            {"ring": {"measured": [0.001, 0.009, 0.002], "model": 0.0015}},
            quantity="time of a step",
            unit="s",
        )
        assert heights_of(figure) == {
            "measured": pytest.approx([2]),
            "model": pytest.approx([1.5]),
        }
        axes = figure.figure.axes[0]
        assert axes.get_ylabel() == "time of a step (ms)"
        (whisker,) = [c for c in axes.collections if hasattr(c, "get_segments")]
        assert whisker.get_segments()[0][:, 1] == pytest.approx([1, 9])
        assert "1.33 times the model" in figure.caption
        assert "medians of 3 repeats" in figure.caption

    def test_models_are_hatched_and_pale_in_the_color_of_what_they_predict(self):
        figure = plots.bars(
            {"1 MiB": {"ours": 2, "gloo": 4, "ours model": 1}}, quantity="time", unit="s"
        )
        looks = {
            c.get_label(): c.patches[0]
            for c in figure.figure.axes[0].containers
            if hasattr(c, "patches")
        }
        model = plots.Style(to_hex(looks["ours"].get_facecolor())).model
        assert looks["ours model"].get_hatch() == model.hatch
        assert to_hex(looks["ours model"].get_facecolor()) == model.color
        assert looks["ours"].get_facecolor() != looks["gloo"].get_facecolor()
        assert "2 times the model" in figure.caption

    @pytest.mark.parametrize(
        ("value", "unit", "label"),
        [
            (3 * 2**20, "bytes", "sent (MiB)"),
            (4e-5, "s", "sent (µs)"),
            (12, "messages", "sent (messages)"),
        ],
    )
    def test_unit_fits_the_largest(self, value, unit, label):
        figure = plots.bars({"ring": {"measured": value}}, quantity="sent", unit=unit)
        assert figure.figure.axes[0].get_ylabel() == label

    def test_equal_to_the_model_is_said_so(self):
        figure = plots.bars(
            {"ring": {"measured": 2048, "model": 2048}}, quantity="bytes sent", unit="bytes"
        )
        assert "equal to the model" in figure.caption
        assert "ring: measured 2 KiB, model 2 KiB" in figure.alt

    def test_series_may_be_absent_from_a_group(self):
        groups = {"a": {"measured": 1}, "b": {"measured": 2, "model": 3}}
        assert heights_of(plots.bars(groups, quantity="time", unit="s"))["model"] == [3]

    def test_log_axis(self):
        groups = {"a": {"measured": 0.001}, "b": {"measured": 10}}
        figure = plots.bars(groups, quantity="time", unit="s", log=True)
        assert figure.figure.axes[0].get_yscale() == "log"
        assert figure.png()

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no bars"):
            plots.bars({}, quantity="time", unit="s")
        with pytest.raises(ValueError, match="measured of a is not: draw with log=False"):
            plots.bars({"a": {"measured": 0}}, quantity="time", unit="s", log=True)
        with pytest.raises(ValueError, match="a number"):
            plots.bars({"a": {"measured": "3 ms"}}, quantity="time", unit="s")
