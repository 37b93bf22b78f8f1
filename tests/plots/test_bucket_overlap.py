import pytest

from labkit.units import format_seconds
from workbook import plots
from workbook.plots.bucket_overlap import example_step


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
        (bars,) = [c for c in axes.collections if c.get_gid() == "spans"]
        boxes = [path.get_extents() for path in bars.get_paths()]
        drawn = [(box.x0 / 1e3, box.x1 / 1e3) for box in boxes if round(box.y0) == 1]
        assert drawn == [pytest.approx((t.start_s, t.end_s)) for t in step.times]
        hatches = {c.get_hatch() for c in axes.collections if c is not bars}
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
