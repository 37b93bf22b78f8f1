import itertools
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from parts import bars_of, legend_of
from splits import LAYERS, LINK, PROFILE, measured

from labkit.comm.peak_memory import PeakMemory
from labkit.placement.planner import predict_split
from workbook import plots
from workbook.plots.palette import STYLES
from workbook.plots.split_costs import AxisRange

# As many layers as make long names of stages.
DEEP = replace(PROFILE, layers=tuple(LAYERS * 18))
CROWDED = [(PROFILE, points) for points in ((), (3,), (4, 5), (1, 2, 3), (3, 4, 5))]
CROWDED += [(DEEP, points) for points in ((55,), (51, 77), (31, 57, 83), (105, 106, 107))]


def predicted(points=(3,), **options):
    return predict_split(PROFILE, points, LINK, **options)


def bars_by_kind(figure, model):
    """By kind, the model's bars or the measured ones, from left to right."""
    found = {}
    for axes in figure.figure.axes:
        for kind, bars in bars_of(axes).items():
            mine = [bar for bar in bars if (bar.get_hatch() == "////") == model]
            found[kind] = sorted(mine, key=lambda bar: bar.get_x())
    return {kind: bars for kind, bars in found.items() if bars}


def heights_of(figure, model=True):
    kinds = bars_by_kind(figure, model).items()
    return {kind: [bar.get_height() for bar in bars] for kind, bars in kinds}


def limits_of(figure):
    """By title, the upper end of the vertical axis."""
    return {axes.get_title("left"): axes.get_ylim()[1] for axes in figure.figure.axes}


def written(figure):
    """All texts that are drawn."""
    figure.draw_without_rendering()
    outside = set()
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        low, high = axis.get_view_interval()
        places = zip(axis.get_majorticklocs(), axis.get_majorticklabels())
        outside |= {label for place, label in places if not low <= place <= high}
    texts = figure.findobj(Text)
    return [t for t in texts if t.get_text() and t.get_visible() and t not in outside]


class TestSplitCosts:
    def test_bars_are_the_times_and_bytes(self):
        split = predicted((3, 4))
        heights = heights_of(plots.split_costs(PROFILE, split))
        ms, mib = 1e3, 2**-20
        assert heights["forward"] == pytest.approx(np.multiply(split.forward_s, ms))
        assert heights["backward"] == pytest.approx(np.multiply(split.backward_s, ms))
        assert heights["step"] == pytest.approx([split.step_s * ms])
        assert heights["activation"] == pytest.approx(np.multiply(split.hop_s, ms))
        assert heights["gradient"] == pytest.approx(np.multiply(split.backward_hop_s, ms))
        assert heights["memory"] == pytest.approx(np.multiply(split.memory_bytes, mib))

    def test_backward_stands_on_forward(self):
        bars = bars_by_kind(plots.split_costs(PROFILE, predicted()), model=True)
        for below, above in (("forward", "backward"), ("activation", "gradient")):
            for low, high in zip(bars[below], bars[above]):
                assert (low.get_x(), low.get_height()) == (high.get_x(), high.get_y())

    def test_without_a_measurement_all_is_pale_hatched_and_says_model(self):
        figure = plots.split_costs(PROFILE, predicted())
        assert not bars_by_kind(figure, model=False)
        (bar, *_) = bars_by_kind(figure, model=True)["forward"]
        assert to_hex(bar.get_facecolor()) == STYLES["forward"].model.color
        assert legend_of(figure)[-1] == "hatched: model"
        assert figure.caption.startswith("Model: the step takes")

    def test_measured_bars_stand_right_of_the_models_on_one_scale(self):
        split = predicted((3, 4))
        figure = plots.split_costs(PROFILE, split, measured(split, factor=2.0))
        models, real = bars_by_kind(figure, model=True), bars_by_kind(figure, model=False)
        assert models.keys() == real.keys()
        for kind in models:
            for left, right in zip(models[kind], real[kind]):
                assert left.get_x() + left.get_width() <= right.get_x()
                assert right.get_height() == pytest.approx(2 * left.get_height())
        assert to_hex(real["forward"][0].get_facecolor()).upper() == STYLES["forward"].color
        assert "Measured: 163 ms, 2.00 times the model (median of 5 steps" in figure.caption
        assert "Measured step 163 ms; stage 0 104 ms" in figure.alt

    def test_the_measured_peaks_of_the_processes_are_in_the_caption(self):
        split = predicted()
        run = replace(measured(split), peak_memory=[PeakMemory(3 * 2**20), PeakMemory(2**30)])
        caption = plots.split_costs(PROFILE, split, run).caption
        assert caption.endswith("Peak memory: stage 0 3 MiB, stage 1 1 GiB.")
        assert "Peak" not in plots.split_costs(PROFILE, split, measured(split)).caption

    def test_whiskers_span_the_middle_half_of_the_steps(self):
        split = predicted()
        run = replace(measured(split), step_s=[0.1, 0.2, 0.3, 0.4, 0.5])
        axes = plots.split_costs(PROFILE, split, run).figure.axes[2]
        ends = [line.get_ydata() for line in axes.lines]
        assert ends == [pytest.approx([200, 400])]

    def test_the_cuts_stand_out_among_all_there_could_be(self):
        axes = plots.split_costs(PROFILE, predicted((3, 4))).figure.axes[0]
        every, cuts = axes.collections
        assert [segment[1][1] for segment in every.get_segments()] == [8, 8, 4, 1, 1]
        colors = [to_hex(color) for color in every.get_colors()]
        assert colors[2] == colors[3] != colors[0] == colors[1] == colors[4]
        assert [segment[0][0] for segment in cuts.get_segments()] == [3, 4]

    def test_one_stage_has_no_hops(self):
        figure = plots.split_costs(PROFILE, predicted(()))
        assert len(figure.figure.axes) == 3
        assert legend_of(figure) == ["forward", "backward", "hatched: model"]
        assert figure.alt.startswith("toy in 1 stage, batch of 16. Predicted step 67 ms; stage 0")
        assert figure.caption == "Model: the step takes 67 ms."

    def test_no_gradient_is_drawn_where_the_layers_before_are_frozen(self):
        split = predicted((3,), frozen=3)
        for real in (None, measured(split)):
            heights = heights_of(plots.split_costs(PROFILE, split, real), model=real is None)
            assert "gradient" not in heights
            assert (len(heights["activation"]), len(heights["backward"])) == (1, 1)

    def test_an_axis_range_keeps_the_axes_where_they_are(self):
        ranges = AxisRange(1.0, 0.1, 1e9)
        one, other = (
            limits_of(plots.split_costs(PROFILE, predicted(points), axis_range=ranges))
            for points in ((1,), (4,))
        )
        assert one == other
        assert one != limits_of(plots.split_costs(PROFILE, predicted((1,))))

    def test_the_words_say_what_is_idle_and_largest(self):
        split = predicted((3,), micro_batches=4, schedule="1f1b")
        figure = plots.split_costs(PROFILE, split)
        assert "stage 0 with 52 ms" in figure.caption
        assert f"idle for {split.bubble:.0%}" in figure.caption
        assert "batch of 16 in 4 micro-batches (1f1b)" in figure.alt
        names = [label.get_text() for label in figure.figure.axes[2].get_xticklabels()]
        assert names[-1] == f"step\nidle {split.bubble:.0%}"

    @pytest.mark.parametrize(("profile", "points"), CROWDED)
    def test_no_word_lies_on_another_or_off_the_figure(self, profile, points):
        split = predict_split(profile, points, LINK)
        figure = plots.split_costs(profile, split, measured(split, 1.01)).figure
        words = [(text.get_text(), text.get_window_extent()) for text in written(figure)]
        for (one, box), (other, other_box) in itertools.combinations(words, 2):
            assert not box.overlaps(other_box), (one, other)
        for word, box in words:
            assert all(map(figure.bbox.containsx, (box.x0, box.x1))), word
            assert all(map(figure.bbox.containsy, (box.y0, box.y1))), word

    def test_a_measurement_of_another_split_is_refused(self):
        split = predicted((3,))
        others = (
            measured(predicted((4,))),
            measured(predicted((3,), micro_batches=2)),
            measured(split, batch_size=32),
        )
        for other in others:
            with pytest.raises(ValueError, match=r"points \(3,\), micro_batches 1, batch size 16"):
                plots.split_costs(PROFILE, split, other)
