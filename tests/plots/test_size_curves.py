import math

import numpy as np
import pytest
from parts import legend_of

from workbook import plots
from workbook.plots.palette import SERIES

KIB = 2**10
# Straight lines that cross where 20 + x = 60 + x / 2: at 80 (KiB and microseconds).
SIZES = [KIB << k for k in range(0, 15, 2)]
TREE = {size: (20 + size / KIB) * 1e-6 for size in SIZES}
RING = {size: (60 + size / KIB / 2) * 1e-6 for size in SIZES}
BOTH = {"tree": TREE, "ring": RING}


def repeated(points):
    return {size: [0.8 * value, value, 1.5 * value] for size, value in points.items()}


def lines_of(figure):
    return {line.get_label(): line for line in figure.figure.axes[0].lines}


class TestTime:
    def test_points_are_medians_at_their_sizes(self):
        lines = lines_of(plots.size_curves({"tree": repeated(TREE)}))
        np.testing.assert_allclose(lines["tree"].get_xydata(), list(TREE.items()))

    def test_the_band_spans_all_repeats(self):
        figure = plots.size_curves({"tree": repeated(TREE)})
        (band,) = figure.figure.axes[0].collections
        ys = band.get_paths()[0].vertices[:, 1]
        assert ys.min() == pytest.approx(0.8 * min(TREE.values()))
        assert ys.max() == pytest.approx(1.5 * max(TREE.values()))
        assert "medians of 3 repeats; bands span all" in figure.caption

    def test_a_model_is_dashed_without_markers_and_says_so(self):
        figure = plots.size_curves(BOTH, {"ring": RING, "nccl": TREE})
        assert legend_of(figure) == ["tree", "ring", "ring model", "nccl model"]
        lines = lines_of(figure)
        assert {lines[name].get_linestyle() for name in ("ring model", "nccl model")} == {"--"}
        assert not lines["ring model"].get_marker()
        assert lines["ring"].get_color() == SERIES[1][0].color
        assert lines["ring model"].get_color() == SERIES[1][0].model.ink

    def test_the_caption_says_who_is_fastest_at_both_ends_and_by_how_much(self):
        figure = plots.size_curves(BOTH)
        said = f"Fastest: tree at 1 KiB, {RING[KIB] / TREE[KIB]:.3g} times as fast as the next; "
        assert figure.caption.startswith(f"{said}ring at 16 MiB, 1.99 times as fast as the next.")
        assert "tree 21 µs at 1 KiB, 276 µs at 256 KiB, 16.4 ms at 16 MiB" in figure.alt
        assert "tree at 1 KiB, as fast as" in plots.size_curves({"tree": TREE, "b": TREE}).caption

    def test_sizes_may_be_texts_as_json_has_them(self):
        texts = {str(size): value for size, value in reversed(TREE.items())}
        assert plots.size_curves({"tree": texts}).alt == plots.size_curves({"tree": TREE}).alt


class TestCrossover:
    def test_crossings_lie_between_the_measured_sizes(self):
        (found,) = plots.crossings(TREE, RING)
        assert found == pytest.approx(80 * KIB, rel=0.05)
        assert plots.crossings(RING, TREE) == [found]
        assert plots.crossings(repeated(TREE), repeated(RING)) == [pytest.approx(found)]

    def test_predicted_and_measured_stand_beside_each_other(self):
        figure = plots.size_curves(BOTH, crossover=81920)
        lines = lines_of(figure)
        assert set(lines_of(plots.size_curves(BOTH))) == {"tree", "ring"}
        model = lines["crossover, model: 80 KiB"]
        assert model.get_xdata()[0] == 81920
        assert model.get_linestyle() == "--"
        (label,) = [label for label in lines if label.startswith("crossover, measured")]
        assert lines[label].get_linestyle() == "-"
        assert lines[label].get_xdata()[0] == plots.crossings(TREE, RING)[0]
        assert "puts the crossover of tree and ring at 80 KiB; it was measured" in figure.caption

    @pytest.mark.parametrize("never", [math.inf, 0.0])
    def test_a_model_may_have_none(self, never):
        figure = plots.size_curves(BOTH, crossover=never)
        assert "The model has no crossover of tree and ring; it was measured" in figure.caption
        assert figure.png()

    def test_between_names_the_pair(self):
        three = BOTH | {"fast": {size: value / 9 for size, value in TREE.items()}}
        assert "none was measured" in plots.size_curves(three, crossover=KIB).caption
        caption = plots.size_curves(three, crossover=KIB, between=("tree", "ring")).caption
        assert "of tree and ring at 1 KiB; it was measured at" in caption


def test_wrong_inputs_are_refused_with_the_next_step():
    with pytest.raises(ValueError, match="no curves to draw: give at least one"):
        plots.size_curves({})
    with pytest.raises(ValueError, match="measured ring has no sizes"):
        plots.size_curves({"ring": {}})
    with pytest.raises(ValueError, match=r"measured ring has \[0\.0\] s at 1024 bytes"):
        plots.size_curves({"ring": {KIB: 0}})
    with pytest.raises(ValueError, match="nccl is not measured: tree, ring are"):
        plots.size_curves(BOTH, crossover=1.0, between=("tree", "nccl"))
