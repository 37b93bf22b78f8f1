import numpy as np
import pytest

from workbook import plots

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
        assert "Its measured step takes 1.25 times the fastest one, of cut 3." in figure.caption
        assert "0.889 to 1.25 times the model's" in figure.caption
        assert "cut 3, predicted 9 ms, measured 8 ms" in figure.alt
        agrees = plots.split_scatter(POINTS[:2])
        assert agrees.caption.startswith("The planner's choice, cut 2, is the fastest")

    def test_axes_have_units(self):
        axes = plots.split_scatter(POINTS).figure.axes[0]
        assert axes.get_xlabel() == "step, model (ms)"
        assert axes.get_ylabel() == "step, measured (ms)"

    def test_one_split_is_no_comparison(self):
        with pytest.raises(ValueError, match="1 split: give two or more"):
            plots.split_scatter(POINTS[:1])
