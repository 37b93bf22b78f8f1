import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from splits import LAYERS, LINK, MIB, PROFILE, measured

from labkit import plots
from labkit.placement.planner import predict_split
from labkit.plots.placement import Reach

# As many layers as make long names of stages.
DEEP = replace(PROFILE, layers=tuple(LAYERS * 18))
SHEETS = [(PROFILE, points) for points in ((), (3,), (4, 5), (1, 2, 3), (3, 4, 5))]
SHEETS += [(DEEP, points) for points in ((55,), (51, 77), (31, 57, 83), (105, 106, 107))]


def predicted(points=(3,), **options):
    return predict_split(PROFILE, points, LINK, **options)


def boxes_of(figure, meaning, model):
    """From left to right, the boxes of one meaning, either the model's or the measured ones."""
    found = []
    for (name, style), boxes in figure.figure.boxes.items():
        if name == meaning and style.is_model == model:
            found += boxes
    return sorted(found)


def heights_of(figure, meaning, model=True):
    return np.array([box.top - box.bottom for box in boxes_of(figure, meaning, model)])


class TestPlacement:
    def test_bars_are_as_high_as_the_times_and_bytes(self):
        split = predicted((3, 4))
        figure = plots.split_costs(PROFILE, split)
        per_second = heights_of(figure, "step")[0] / split.step_s
        stage_0 = heights_of(figure, "forward")[0]
        assert stage_0 == pytest.approx(per_second * 0.016)
        np.testing.assert_allclose(
            heights_of(figure, "backward"), per_second * np.array(split.backward_s)
        )
        hops = heights_of(figure, "activation")
        assert hops[0] / hops[1] == pytest.approx(split.hop_s[0] / split.hop_s[1])
        memory = heights_of(figure, "memory")
        np.testing.assert_allclose(memory / memory[0], np.array(split.memory_bytes) / memory_0())

    def test_backward_stands_on_forward(self):
        figure = plots.split_costs(PROFILE, predicted())
        for below, above in (("forward", "backward"), ("activation", "gradient")):
            for low, high in zip(boxes_of(figure, below, True), boxes_of(figure, above, True)):
                assert (low.left, low.right, low.top) == (high.left, high.right, high.bottom)

    def test_without_a_measurement_all_is_pale_hatched_and_says_model(self):
        figure = plots.split_costs(PROFILE, predicted())
        styles = {style for name, style in figure.figure.boxes if name not in ("cut", "no cut")}
        assert all(style.is_model for style in styles)
        assert "hatched: model" in figure.figure.words.values()
        assert figure.alt.count("Predicted") == 1
        assert figure.caption.startswith("Model: the step takes")

    def test_measured_bars_stand_right_of_the_models_on_one_scale(self):
        split = predicted((3, 4))
        figure = plots.split_costs(PROFILE, split, measured(split, factor=2.0))
        for meaning in ("forward", "backward", "activation", "gradient", "memory", "step"):
            pairs = zip(boxes_of(figure, meaning, True), boxes_of(figure, meaning, False))
            for model, real in pairs:
                assert model.right <= real.left
                ratio = (real.top - real.bottom) / (model.top - model.bottom)
                assert ratio == pytest.approx(2, rel=1e-6)
        assert "Measured: 163 ms, 2.00 times the model (median of 5 steps" in figure.caption
        assert "Measured step 163 ms; stage 0 104 ms" in figure.alt

    def test_the_cuts_stand_out_among_all_there_could_be(self):
        figure = plots.split_costs(PROFILE, predicted((3, 4)))
        cuts, others = boxes_of(figure, "cut", False), boxes_of(figure, "no cut", False)
        assert len(cuts) == 2
        assert len(others) == 3
        heights = [box.top - box.bottom for box in sorted([*cuts, *others])]
        np.testing.assert_allclose(np.array(heights) / heights[0], [1, 1, 0.5, 0.125, 0.125])

    def test_one_stage_has_no_hops(self):
        figure = plots.split_costs(PROFILE, predicted(()))
        assert "Hops, there and back" not in figure.figure.words.values()
        assert "activation" not in figure.figure.words.values()
        assert figure.alt.startswith("toy in 1 stage, batch of 16. Predicted step 67 ms; stage 0")
        assert figure.caption == "Model: the step takes 67 ms."

    def test_no_gradient_is_drawn_where_the_layers_before_are_frozen(self):
        split = predicted((3,), frozen=3)
        for real in (None, measured(split)):
            figure = plots.split_costs(PROFILE, split, real)
            assert not boxes_of(figure, "gradient", True)
            assert not boxes_of(figure, "gradient", False)
            assert len(boxes_of(figure, "activation", True)) == 1
            assert len(boxes_of(figure, "backward", True)) == 1

    def test_reach_keeps_the_axes_where_they_are(self):
        reach = Reach(1.0, 0.1, 1e9)
        one, other = (
            plots.split_costs(PROFILE, predicted(points), reach=reach) for points in ((1,), (4,))
        )
        for meaning, size in (("step", "step_s"), ("activation", "hop_s")):
            ratio = heights_of(one, meaning)[0] / heights_of(other, meaning)[0]
            sizes = [getattr(predicted(points), size) for points in ((1,), (4,))]
            expected = np.divide(*sizes)
            assert ratio == pytest.approx(float(np.ravel(expected)[0]))

    def test_the_words_say_what_is_idle_and_largest(self):
        split = predicted((3,), micro_batches=4, schedule="1f1b")
        figure = plots.split_costs(PROFILE, split)
        assert "The largest stage is stage 0 with 52 ms" in figure.caption
        assert f"stages are idle for {split.bubble:.0%} of the step" in figure.caption
        assert "batch of 16 in 4 micro-batches (1f1b)" in figure.alt
        assert f"idle {split.bubble:.0%}" in figure.figure.words.values()

    @pytest.mark.parametrize(("profile", "points"), SHEETS)
    def test_no_word_lies_on_another_or_off_the_sheet(self, profile, points):
        split = predict_split(profile, points, LINK)
        sheet = plots.split_costs(profile, split, measured(split, 1.01)).figure
        (words,) = [c for c in sheet.get_children() if isinstance(c, PathCollection)]
        places = [(p.vertices.min(axis=0), p.vertices.max(axis=0)) for p in words.get_paths()]
        for (low, high), (other_low, other_high) in itertools.combinations(places, 2):
            assert (high < other_low).any() or (other_high < low).any(), sheet.words
        for low, high in places:
            assert (low >= 0).all()
            assert (high <= (sheet.width, sheet.height)).all()

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

    def test_it_is_a_picture_with_words_like_every_figure(self, tmp_path):
        figure = plots.split_costs(PROFILE, predicted(), title="Where to cut")
        assert "Where to cut" in figure.figure.words.values()
        assert figure.png().startswith(b"\x89PNG")
        assert "<svg" in figure.save(tmp_path / "a.svg").read_text(encoding="utf-8")
        assert figure.png() == plots.split_costs(PROFILE, predicted(), title="Where to cut").png()
        assert figure.alt.endswith(".")
        assert figure.caption.endswith(".")


def memory_0():
    return predicted((3, 4)).memory_bytes[0]


def rows():
    found = []
    for batch_size in (16, 32):
        split = predicted((3, 4))
        run = replace(measured(split), batch_size=batch_size)
        found += plots.hop_rows("3 devices", run, split)
    return found


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
        assert "model_s" not in plots.hop_rows("3 devices", measured(split))[0]

    def test_what_does_not_cross_has_no_row(self):
        split = predicted((3, 4), frozen=4)
        found = plots.hop_rows("frozen", measured(split), split)
        assert [(row["cut"], row["direction"]) for row in found] == [
            (3, "activation"),
            (4, "activation"),
        ]
        figure = plots.communication_time(found)
        assert [axes.get_title("left") for axes in figure.figure.axes] == [
            "Activations, forward",
            "Bytes, either way",
        ]

    def test_bars_are_medians_and_the_models_are_hatched(self):
        forward, backward, sizes = plots.communication_time(rows()).figure.axes
        split = predicted((3, 4))
        for axes in (forward, backward):
            bars = [(patch.get_width(), patch.get_hatch()) for patch in axes.patches]
            models = [width for width, hatch in bars if hatch == "////"]
            assert sorted(models) == sorted(2 * split.hop_s)
            assert len(bars) == 8
        widths = [patch.get_width() for patch in sizes.patches]
        assert widths == [4 * MIB, MIB] * 2

    def test_groups_are_named_from_the_top_and_nothing_overlaps(self):
        axes = plots.communication_time(rows()).figure.axes[0]
        assert [t.get_text() for t in axes.get_yticklabels()] == [
            "3 devices\ncut 3",
            "3 devices\ncut 4",
        ]
        low, high = axes.get_ylim()
        assert low > high
        edges = sorted((p.get_y(), p.get_y() + p.get_height()) for p in axes.patches)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(edges))

    def test_whiskers_span_the_middle_half(self):
        row = rows()[0] | {"seconds": [1.0, 2.0, 3.0, 4.0, 50.0]}
        figure = plots.communication_time([row])
        (whisker,) = [c for c in figure.figure.axes[0].collections if hasattr(c, "get_segments")]
        assert whisker.get_segments()[0][:, 0].tolist() == [2.0, 4.0]
        assert "medians of 5 steps; whiskers span the middle half" in figure.caption

    def test_words(self):
        figure = plots.communication_time(rows())
        assert "3 devices, cut 3, batch 16, activation, 4 MiB in 10.4 ms, model 5.19 ms" in (
            figure.alt
        )
        assert "measured is 2 times the model (hatched)" in figure.caption
        assert len(plots.communication_time(rows() * 3).alt) < 300

    def test_wrong_rows_are_refused(self):
        with pytest.raises(ValueError, match="one cut or more"):
            plots.communication_time([])
        with pytest.raises(ValueError, match=r"hop of 0 s.*above 0 only"):
            plots.communication_time([rows()[0] | {"seconds": [0.0]}])
        with pytest.raises(ValueError, match="unknown direction 'sideways'"):
            plots.communication_time([rows()[0] | {"direction": "sideways"}])


POINTS = [
    {"split_points": (1,), "predicted_s": 0.010, "measured_s": [0.011, 0.012, 0.020]},
    {"split_points": (2,), "predicted_s": 0.008, "measured_s": 0.010},
    {"split_points": (3,), "predicted_s": 0.009, "measured_s": [0.008]},
]


class TestSplitScatter:
    def test_points_are_predicted_against_median_measured(self):
        figure = plots.split_scatter(POINTS)
        lines = {line.get_label(): line for line in figure.figure.axes[0].lines}
        np.testing.assert_allclose(
            lines["a split"].get_xydata(), [(10, 12), (8, 10), (9, 8)], rtol=1e-12
        )
        choice = lines["planner's choice: cut 2"].get_xydata()
        best = lines["fastest measured: cut 3"].get_xydata()
        np.testing.assert_allclose([*choice, *best], [(8, 10), (9, 8)])
        ends = lines["measured = model"].get_xydata()
        np.testing.assert_allclose(ends[:, 0], ends[:, 1])

    def test_the_words_tell_what_the_planner_missed(self):
        figure = plots.split_scatter(POINTS)
        assert "chooses cut 2; measured, it takes 1.25 times the fastest, cut 3." in figure.caption
        assert "0.889 to 1.25 times the model's" in figure.caption
        assert "fastest measured is cut 3, predicted 9 ms, measured 8 ms" in figure.alt
        agrees = plots.split_scatter(POINTS[:2])
        assert agrees.caption.startswith("The planner's choice, cut 2, is the fastest")

    def test_axes_have_units(self):
        axes = plots.split_scatter(POINTS).figure.axes[0]
        assert re.fullmatch(r"step, model \(ms\)", axes.get_xlabel())
        assert re.fullmatch(r"step, measured \(ms\)", axes.get_ylabel())

    def test_one_split_is_no_comparison(self):
        with pytest.raises(ValueError, match="1 split: give two or more"):
            plots.split_scatter(POINTS[:1])
