"""Figures of models that have sliders on a page, of rings, bars, and learning curves."""

import itertools
import math
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex
from parts import RUN, UPDATES, bars_of, spans_of

from labkit.costs.async_run import simulate
from labkit.units import format_seconds
from workbook import plots
from workbook.plots.models import BUCKET_SIZES_MB, example_step, size_name
from workbook.plots.palette import Style


class TestBucketOverlap:
    def test_bars_and_words_are_the_models(self):
        step = example_step(25, 4, "10 Gb/s network")
        figure = plots.bucket_overlap(25, 4, "10 Gb/s network")
        assert f"{len(step.buckets)} all-reduces" in figure.caption
        assert format_seconds(step.exposed_s) in figure.caption
        names = {size_name(size) for size in BUCKET_SIZES_MB}
        assert {name for name in names if f" {name} " in figure.caption} == {"25 MiB"}
        bars = spans_of(figure)
        boxes = [path.get_extents() for path in bars.get_paths()]
        drawn = [(box.x0 / 1e3, box.x1 / 1e3) for box in boxes if round(box.y0) == 1]
        assert drawn == [pytest.approx((t.start_s, t.end_s)) for t in step.times]
        hatches = {c.get_hatch() for c in figure.figure.axes[0].collections if c is not bars}
        assert hatches == {plots.STYLES["compute"].model.hatch}


class TestStaleness:
    def test_bars_are_the_updates_stacked_by_worker(self):
        axes = plots.staleness_histogram(UPDATES, bound=5).figure.axes[0]
        bars = [(round(b.get_x() + 0.4), b.get_y(), b.get_height()) for b in axes.patches]
        first, second, third = bars[:6], bars[6:12], bars[12:]
        assert [height for _, _, height in first] == [2, 1, 0, 0, 0, 0]
        assert second[1] == (1, 1, 1), "the second worker's update stands on the first one's"
        assert third[3] == (3, 0, 1)
        assert axes.lines[0].get_xdata() == [5.5, 5.5], "right of the last bar that is allowed"

    @pytest.mark.parametrize(("workers", "factor", "bound"), [(1, 1, None), (6, 8, 5), (2, 4, 3)])
    def test_the_model_is_the_simulators(self, workers, factor, bound):
        timetable = simulate(workers, factor=factor, bound=bound)
        figure = plots.staleness_model(workers, factor, bound)
        histogram = figure.figure.axes[1]
        assert sum(bar.get_height() for bar in histogram.patches) == len(timetable.updates)
        assert f"{len(timetable.updates)} gradients are applied" in figure.caption
        assert "(predicted)" in figure.figure.get_suptitle()


class TestRing:
    def test_states_start_with_own_parts_and_end_complete(self):
        states = plots.ring_states(4)
        assert [state.complete for state in states] == [0, 0, 0, 4, 8, 12, 16]
        for before, after in itertools.pairwise(states):
            assert len(after.messages) == 4
            for src, dst, chunk in after.messages:
                assert before.contributions[src][chunk] <= after.contributions[dst][chunk]

    def test_cells_print_value_and_ranks_and_messages_are_arrows(self):
        axes = plots.ring_step(2, 4).figure.axes[0]
        texts = [text.get_text() for text in axes.texts if text.get_text()]
        assert texts[:8] == ["1", "0", "2", "0", "3303", "0,2,3", "4004", "0,3"]
        own = plots.ring_steps(plots.ring_states(2, [[1, 2], [10, 20.5]])[-1:], title="the end")
        axes = own.figure.axes[0]
        texts = [text.get_text() for text in axes.texts if text.get_text()]
        assert texts == ["11", "all", "22.5", "all"] * 2
        arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
        assert {(arrow.xyann[1], arrow.xy[1]) for arrow in arrows} == {(0, 1), (1, 0)}

    @pytest.mark.parametrize("world_size", [2, 4, 6])
    def test_nothing_moves_from_step_to_step(self, world_size):
        figures = [plots.ring_step(s, world_size).figure for s in range(2 * world_size - 1)]
        places = {tuple(figure.axes[0].get_position().bounds) for figure in figures}
        assert len({tuple(figure.get_size_inches()) for figure in figures} | places) == 2
        assert figures[0].get_figwidth() <= 8.5


class TestBars:
    def test_bars_are_medians_with_whiskers_and_models_are_pale_and_hatched(self):
        groups = {"1 MiB": {"ours": [1e-3, 9e-3, 2e-3], "gloo": 4e-3, "ours predicted": 1.5e-3}}
        figure = plots.bars(groups, quantity="time of a step", unit="s")
        axes = figure.figure.axes[0]
        assert axes.get_ylabel() == "time of a step (ms)"
        looks = {name: bar for name, (bar,) in bars_of(axes).items()}
        assert [bar.get_height() for bar in looks.values()] == pytest.approx([2, 4, 1.5])
        (whisker,) = [c for c in axes.collections if hasattr(c, "get_segments")]
        assert whisker.get_segments()[0][:, 1] == pytest.approx([1, 9])
        model = Style(to_hex(looks["ours"].get_facecolor())).model
        assert looks["ours predicted"].get_hatch() == model.hatch
        assert to_hex(looks["ours predicted"].get_facecolor()) == model.color
        assert looks["ours"].get_facecolor() != looks["gloo"].get_facecolor()
        assert "1.33 times what was predicted" in figure.caption


class TestMemoryLedger:
    def test_a_model_is_hatched_and_what_was_held_stands_beside_it(self):
        models = {"a": {"parameters": 4096, "in_flight": 0}, "b": {"gradients": 2048}}
        figure = plots.memory_ledger(models, {"a": {"parameters": 6144}})
        bars = {round(bar.get_x() + 0.17, 2): bar for bar in figure.figure.axes[0].patches}
        assert {x: bar.get_height() for x, bar in bars.items()} == {0: 4, 0.36: 6, 1: 2}
        assert {x: bar.get_hatch() for x, bar in bars.items()} == {
            0: "////",
            0.36: None,
            1: "////",
        }
        assert "is 1.5 times what was predicted" in figure.caption

    def test_a_limit_is_a_line_in_gb(self):
        axes = plots.memory_ledger({"a": {"gradients": 9e10}}, limit_bytes=8e10).figure.axes[0]
        assert axes.lines[0].get_ydata() == pytest.approx([80, 80])
        assert axes.patches[0].get_height() == pytest.approx(90)


class TestLearningCurves:
    def test_curves_are_the_epochs_by_epoch_and_by_second(self):
        grid = plots.learning_curves({"ring": RUN}).figure.axes
        lines = [axes.lines[0].get_xydata().tolist() for axes in grid]
        assert lines[:2] == [[[1, 2], [2, 1]], [[3, 2], [5, 1]]]
        assert lines[2:] == [[[1, 25], [2, 75]], [[3, 25], [5, 75]]]

    def test_runs_without_held_out_samples_have_no_accuracy_in_words(self):
        epochs = [epoch | {"test_accuracy": math.nan} for epoch in RUN.epochs]
        run = SimpleNamespace(epochs=epochs, bytes_sent=RUN.bytes_sent)
        figure = plots.learning_curves({"ring": run, "tree": run})
        assert "nan" not in f"{figure.alt} {figure.caption}"
        assert "First to finish" in figure.caption

    def test_an_axis_may_be_what_the_busiest_rank_has_sent(self):
        axes = plots.learning_curves({"ring": RUN}, by=("second", "megabyte")).figure.axes[1]
        assert axes.lines[0].get_xydata().tolist() == [[3, 2], [6, 1]]
