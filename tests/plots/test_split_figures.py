import itertools
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from parts import bars_of
from splits import LAYERS, LINK, PROFILE, measured

from labkit.placement.planner import predict_split
from workbook import plots

# As many layers as make long names of stages.
DEEP = replace(PROFILE, layers=tuple(LAYERS * 18))
CROWDED = [(PROFILE, points) for points in ((), (3,), (4, 5), (1, 2, 3), (3, 4, 5))]
CROWDED += [(DEEP, points) for points in ((55,), (51, 77), (31, 57, 83), (105, 106, 107))]
KINDS = {"forward", "backward", "activation", "gradient", "step", "memory"}
POINTS = [
    {"split_points": (1,), "predicted_s": 0.010, "measured_s": [0.011, 0.012, 0.020]},
    {"split_points": (2,), "predicted_s": 0.008, "measured_s": 0.010},
    {"split_points": (3,), "predicted_s": 0.009, "measured_s": [0.008]},
]


def predicted(points=(3,), **options):
    return predict_split(PROFILE, points, LINK, **options)


def bars_by_kind(figure, model):
    """By kind, the model's bars or the measured ones, from left to right."""
    found = {}
    for axes in figure.figure.axes:
        for kind, bars in bars_of(axes).items():
            mine = [bar for bar in bars if (bar.get_hatch() == "////") == model]
            found[kind] = sorted(mine, key=lambda bar: bar.get_x())
    return {kind: bars for kind, bars in found.items() if bars and kind in KINDS}


class TestSplitCosts:
    def test_bars_are_the_times_and_bytes(self):
        split = predicted((3, 4))
        figure = plots.split_costs(PROFILE, split)
        bars, ms, mib = bars_by_kind(figure, model=True), 1e3, 2**-20
        heights = {kind: [bar.get_height() for bar in each] for kind, each in bars.items()}
        assert heights["forward"] == pytest.approx(np.multiply(split.forward_s, ms))
        assert heights["backward"] == pytest.approx(np.multiply(split.backward_s, ms))
        assert heights["step"] == pytest.approx([split.step_s * ms])
        assert heights["activation"] == pytest.approx(np.multiply(split.hop_s, ms))
        assert heights["gradient"] == pytest.approx(np.multiply(split.backward_hop_s, ms))
        assert heights["memory"] == pytest.approx(np.multiply(split.memory_bytes, mib))
        for low, high in zip(bars["forward"], bars["backward"]):
            assert (low.get_x(), low.get_height()) == (high.get_x(), high.get_y())
        every = figure.figure.axes[0].patches
        assert [bar.get_height() for bar in every] == [8, 8, 4, 1, 1]
        colors = [to_hex(bar.get_facecolor()) for bar in every]
        assert colors[2] == colors[3] != colors[0] == colors[1] == colors[4], "cuts stand out"

    def test_measured_bars_stand_right_of_the_models_on_one_scale(self):
        split = predicted((3, 4))
        figure = plots.split_costs(PROFILE, split, measured(split, factor=2.0))
        models, real = bars_by_kind(figure, model=True), bars_by_kind(figure, model=False)
        assert models.keys() == real.keys()
        for kind in models:
            for left, right in zip(models[kind], real[kind]):
                assert left.get_x() + left.get_width() <= right.get_x()
                assert right.get_height() == pytest.approx(2 * left.get_height())
        assert "Measured: 163 ms, 2.00 times the model (median of 5 steps" in figure.caption

    @pytest.mark.parametrize(("profile", "points"), CROWDED)
    def test_no_word_lies_on_another_or_off_the_figure(self, profile, points):
        split = predict_split(profile, points, LINK)
        figure = plots.split_costs(profile, split, measured(split, 1.01)).figure
        figure.draw_without_rendering()
        outside = set()
        for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
            low, high = axis.get_view_interval()
            places = zip(axis.get_majorticklocs(), axis.get_majorticklabels())
            outside |= {label for place, label in places if not low <= place <= high}
        texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
        words = [(t.get_text(), t.get_window_extent()) for t in texts if t not in outside]
        for (one, box), (other, other_box) in itertools.combinations(words, 2):
            assert not box.overlaps(other_box), (one, other)
        for word, box in words:
            assert all(map(figure.bbox.containsx, (box.x0, box.x1))), word
            assert all(map(figure.bbox.containsy, (box.y0, box.y1))), word

    def test_a_measurement_of_another_split_is_refused(self):
        for other in (predicted((4,)), predicted((3,), micro_batches=2)):
            with pytest.raises(ValueError, match=r"predicted is \(\(3,\), 1, 16\)"):
                plots.split_costs(PROFILE, predicted((3,)), measured(other))


def test_many_splits_are_points_and_the_words_tell_what_the_planner_missed():
    figure = plots.split_scatter(POINTS)
    axes = figure.figure.axes[0]
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    np.testing.assert_allclose(lines["a split"], [(10, 12), (8, 10), (9, 8)], rtol=1e-12)
    np.testing.assert_allclose(lines["planner's choice: cut 2"], [(8, 10)])
    np.testing.assert_allclose(lines["fastest measured: cut 3"], [(9, 8)])
    assert axes.get_xlabel() == "step, model (ms)"
    assert "cut 2, whose step takes 1.25 times that of the fastest split" in figure.caption
    assert "0.889 to 1.25 times the model" in figure.caption
