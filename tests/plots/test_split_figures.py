import itertools
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from parts import bars_of
from splits import LAYERS, LINK, MIB, PROFILE, measured

from labkit.comm.peak_memory import PeakMemory
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


def heights_of(figure, model=True):
    kinds = bars_by_kind(figure, model).items()
    return {kind: [bar.get_height() for bar in bars] for kind, bars in kinds}


def hops():
    found = []
    for batch_size in (16, 32):
        split = predicted((3, 4))
        run = replace(measured(split), batch_size=batch_size)
        found += plots.hop_rows("3 devices", run, split)
    return found


class TestSplitCosts:
    def test_bars_are_the_times_and_bytes(self):
        split = predicted((3, 4))
        figure = plots.split_costs(PROFILE, split)
        heights, ms, mib = heights_of(figure), 1e3, 2**-20
        assert heights["forward"] == pytest.approx(np.multiply(split.forward_s, ms))
        assert heights["backward"] == pytest.approx(np.multiply(split.backward_s, ms))
        assert heights["step"] == pytest.approx([split.step_s * ms])
        assert heights["activation"] == pytest.approx(np.multiply(split.hop_s, ms))
        assert heights["gradient"] == pytest.approx(np.multiply(split.backward_hop_s, ms))
        assert heights["memory"] == pytest.approx(np.multiply(split.memory_bytes, mib))
        bars = bars_by_kind(figure, model=True)
        for low, high in zip(bars["forward"], bars["backward"]):
            assert (low.get_x(), low.get_height()) == (high.get_x(), high.get_y())
        every = figure.figure.axes[0].patches
        assert [bar.get_height() for bar in every] == [8, 8, 4, 1, 1]
        colors = [to_hex(bar.get_facecolor()) for bar in every]
        assert colors[2] == colors[3] != colors[0] == colors[1] == colors[4], "cuts stand out"

    def test_measured_bars_stand_right_of_the_models_on_one_scale(self):
        split = predicted((3, 4))
        peaks = [PeakMemory(3 * 2**20), PeakMemory(2**30), PeakMemory(2**10)]
        run = replace(measured(split, factor=2.0), peak_memory=peaks)
        figure = plots.split_costs(PROFILE, split, run)
        models, real = bars_by_kind(figure, model=True), bars_by_kind(figure, model=False)
        assert models.keys() == real.keys()
        for kind in models:
            for left, right in zip(models[kind], real[kind]):
                assert left.get_x() + left.get_width() <= right.get_x()
                assert right.get_height() == pytest.approx(2 * left.get_height())
        assert "Measured: 163 ms, 2.00 times the model (median of 5 steps" in figure.caption
        assert figure.caption.endswith("stage 0 3 MiB, stage 1 1 GiB, stage 2 1 KiB.")
        assert "Measured step 163 ms; stage 0 104 ms" in figure.alt

    def test_one_stage_has_no_hops_and_frozen_layers_no_gradient(self):
        figure = plots.split_costs(PROFILE, predicted(()))
        assert len(figure.figure.axes) == 3
        assert figure.alt.startswith("toy in 1 stage, batch of 16. Predicted step 67 ms; stage 0")
        assert figure.caption == "Model: the step takes 67 ms."
        split = predicted((3,), frozen=3)
        for real in (None, measured(split)):
            heights = heights_of(plots.split_costs(PROFILE, split, real), model=real is None)
            assert "gradient" not in heights
            assert (len(heights["activation"]), len(heights["backward"])) == (1, 1)

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

    @pytest.mark.parametrize(
        "other",
        [
            measured(predicted((4,))),
            measured(predicted((3,), micro_batches=2)),
            measured(predicted((3,)), batch_size=32),
        ],
    )
    def test_a_measurement_of_another_split_is_refused(self, other):
        with pytest.raises(ValueError, match=r"points \(3,\), micro_batches 1, batch size 16"):
            plots.split_costs(PROFILE, predicted((3,)), other)


class TestCommunicationTime:
    def test_a_split_has_a_row_for_each_cut_and_direction(self):
        split = predicted((3, 4))
        first, second, *_ = found = plots.hop_rows("3 devices", measured(split, 2.0), split)
        assert len(found) == 4
        assert first == {
            "placement": "3 devices",
            "cut": 3,
            "direction": "activation",
            "batch_size": 16,
            "num_bytes": 4 * MIB,
            "seconds": [2 * split.hop_s[0]] * 5,
            "model_s": split.hop_s[0],
        }
        assert (second["cut"], second["direction"]) == (3, "gradient")

    def test_what_does_not_cross_has_no_row(self):
        split = predicted((3, 4), frozen=4)
        found = plots.hop_rows("frozen", measured(split), split)
        crossed = [(row["cut"], row["direction"]) for row in found]
        assert crossed == [(3, "activation"), (4, "activation")]
        titles = [a.get_title("left") for a in plots.communication_time(found).figure.axes]
        assert titles == ["Activations, forward", "Bytes, either way"]

    def test_bars_are_medians_the_models_are_hatched_and_both_ways_share_an_axis(self):
        forward, backward, sizes = plots.communication_time(hops()).figure.axes
        split = predicted((3, 4))
        for axes in (forward, backward):
            bars = [(patch.get_width(), patch.get_hatch()) for patch in axes.patches]
            models = [width for width, hatch in bars if hatch == "////"]
            assert sorted(models) == sorted(2 * split.hop_s)
            assert len(bars) == 8
        assert [patch.get_width() for patch in sizes.patches] == [4 * MIB, MIB] * 2
        assert forward.get_xlim() == backward.get_xlim()
        groups = [label.get_text() for label in forward.get_yticklabels()]
        assert groups == ["3 devices\ncut 3", "3 devices\ncut 4"]
        edges = sorted((p.get_y(), p.get_y() + p.get_height()) for p in forward.patches)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(edges))

    def test_wrong_rows_are_refused(self):
        with pytest.raises(ValueError, match="one cut or more"):
            plots.communication_time([])
        with pytest.raises(ValueError, match=r"hop of 0 s.*above 0 only"):
            plots.communication_time([hops()[0] | {"seconds": [0.0]}])
        with pytest.raises(ValueError, match="unknown direction 'sideways'"):
            plots.communication_time([hops()[0] | {"direction": "sideways"}])


class TestSplitScatter:
    def test_points_are_predicted_against_median_measured(self):
        axes = plots.split_scatter(POINTS).figure.axes[0]
        lines = {line.get_label(): line.get_xydata() for line in axes.lines}
        np.testing.assert_allclose(lines["a split"], [(10, 12), (8, 10), (9, 8)], rtol=1e-12)
        np.testing.assert_allclose(lines["planner's choice: cut 2"], [(8, 10)])
        np.testing.assert_allclose(lines["fastest measured: cut 3"], [(9, 8)])
        assert axes.get_xlabel() == "step, model (ms)"

    def test_the_words_tell_what_the_planner_missed(self):
        figure = plots.split_scatter(POINTS)
        assert "Its measured step takes 1.25 times the fastest one, of cut 3." in figure.caption
        assert "0.889 to 1.25 times the model's" in figure.caption
        assert "cut 3, predicted 9 ms, measured 8 ms" in figure.alt
        agrees = plots.split_scatter(POINTS[:2])
        assert agrees.caption.startswith("The planner's choice, cut 2, is the fastest")
        with pytest.raises(ValueError, match="1 split: give two or more"):
            plots.split_scatter(POINTS[:1])
