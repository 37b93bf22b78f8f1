"""Figures of models that have sliders on a page, bars, and learning curves."""

from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex
from parts import EPOCHS, UPDATES, bars_of, legend_of, spans_of

from labkit.costs.async_run import simulate
from labkit.units import format_seconds
from workbook import plots
from workbook.plots.models import example_step


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
        figure = plots.bucket_overlap(25, 4, "10 Gb/s network")
        bars = spans_of(figure)
        boxes = [path.get_extents() for path in bars.get_paths()]
        drawn = [(box.x0 / 1e3, box.x1 / 1e3) for box in boxes if round(box.y0) == 1]
        assert drawn == [pytest.approx((t.start_s, t.end_s)) for t in step.times]
        hatches = {c.get_hatch() for c in figure.figure.axes[0].collections if c is not bars}
        assert hatches == {plots.STYLES["compute"].model.hatch}

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
            ((25, 1), "world_size must be 2 or more, got 1"),
            ((-1, 2), "bucket_mb must be 0"),
            ((25, 2, "pigeon"), "unknown link 'pigeon': choose one of shared memory"),
        ],
    )
    def test_wrong_inputs_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            plots.bucket_overlap(*arguments)


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


class TestBars:
    def test_bars_are_medians_with_whiskers_over_all_repeats(self):
        groups = {"ring": {"measured": [0.001, 0.009, 0.002], "model": 0.0015}}
        figure = plots.bars(groups, quantity="time of a step", unit="s")
        axes = figure.figure.axes[0]
        heights = {name: bar.get_height() for name, (bar,) in bars_of(axes).items()}
        assert heights == {"measured": pytest.approx(2), "model": pytest.approx(1.5)}
        assert axes.get_ylabel() == "time of a step (ms)"
        (whisker,) = [c for c in axes.collections if hasattr(c, "get_segments")]
        assert whisker.get_segments()[0][:, 1] == pytest.approx([1, 9])
        assert "1.33 times the model" in figure.caption
        assert "medians of 3 repeats" in figure.caption

    def test_models_are_hatched_and_pale_in_the_color_of_what_they_predict(self):
        groups = {"1 MiB": {"ours": 2, "gloo": 4, "ours model": 1}}
        figure = plots.bars(groups, quantity="time", unit="s")
        looks = {name: bar for name, (bar,) in bars_of(figure.figure.axes[0]).items()}
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

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no bars"):
            plots.bars({}, quantity="time", unit="s")
        with pytest.raises(ValueError, match="a number"):
            plots.bars({"a": {"measured": "3 ms"}}, quantity="time", unit="s")


class TestLearningCurves:
    def test_draws_loss_and_accuracy_by_epoch_and_by_second(self):
        grid = plots.learning_curves({"single": EPOCHS}).figure.axes
        lines = [axes.lines[0].get_xydata().tolist() for axes in grid]
        assert lines[:2] == [[[1, 2], [2, 1]], [[3, 2], [5, 1]]]
        assert lines[2:] == [[[1, 25], [2, 75]], [[3, 25], [5, 75]]]

    def test_takes_results_and_names_each_run(self):
        runs = {"ring": SimpleNamespace(epochs=EPOCHS), "single": EPOCHS[:1]}
        figure = plots.learning_curves(runs)
        assert legend_of(figure) == ["ring", "single"]
        assert "loss 1 and held-out accuracy 75.0% after 2 epochs" in figure.alt
        assert "ring, 75.0%" in figure.caption
        assert "First to end: single, after 3 s" in figure.caption
        tied = plots.learning_curves({"a": EPOCHS, "b": EPOCHS[:1], "c": EPOCHS}).caption
        assert "at the end: a and c, 75.0%." in tied
        assert "all, 75.0%" in plots.learning_curves({"a": EPOCHS, "b": EPOCHS}).caption

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no runs"):
            plots.learning_curves({})
        with pytest.raises(ValueError, match="a has no epochs"):
            plots.learning_curves({"a": []})
        with pytest.raises(ValueError, match="a has epochs without test_accuracy, seconds"):
            plots.learning_curves({"a": [{"loss": 1}]})
