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


def test_points_are_medians_and_the_band_spans_all_repeats():
    figure = plots.size_curves({"tree": repeated(TREE)})
    np.testing.assert_allclose(lines_of(figure)["tree"].get_xydata(), list(TREE.items()))
    (band,) = figure.figure.axes[0].collections
    ys = band.get_paths()[0].vertices[:, 1]
    assert ys.min() == pytest.approx(0.8 * min(TREE.values()))
    assert ys.max() == pytest.approx(1.5 * max(TREE.values()))
    assert "medians of 3 repeats; bands span all" in figure.caption
    texts = {str(size): value for size, value in reversed(TREE.items())}  # as JSON has them
    assert plots.size_curves({"tree": texts}).alt == plots.size_curves({"tree": TREE}).alt


def test_a_model_is_dashed_in_the_color_of_what_it_predicts():
    figure = plots.size_curves(BOTH, {"ring": RING, "nccl": TREE})
    assert legend_of(figure) == ["tree", "ring", "nccl, theory", "theory"]
    model = lines_of(figure)["ring, theory"]
    assert model.get_linestyle() == "--"
    assert model.get_color() == SERIES[1][0].model.ink


@pytest.mark.parametrize(("model", "said"), [(81920, "80 KiB"), (math.inf, "no size")])
def test_crossings_stand_beside_the_models(model, said):
    (found,) = plots.crossings(TREE, RING)
    assert found == pytest.approx(80 * KIB, rel=0.05)
    assert plots.crossings(repeated(RING), repeated(TREE)) == [pytest.approx(found)]
    three = BOTH | {"fast": {size: value / 9 for size, value in TREE.items()}}
    figure = plots.size_curves(three, crossover=model)
    lines = {name: line for name, line in lines_of(figure).items() if "crossover" in name}
    marks = {line.get_linestyle(): line.get_xdata()[0] for line in lines.values()}
    assert marks == {"-": found} | ({"--": model} if model < math.inf else {})
    assert f"tree and ring cross at 83.5 KiB, in theory at {said}" in figure.caption


def test_a_step_by_micro_batches_has_a_curve_for_each_schedule():
    sizes = {"gpipe": ([6, 7, 30], [10]), "1f1b": ([9.5], [8.5])}
    rows = [
        {"schedule": name, "micro_batches": count, "step_s": step_s, "model_s": 5.0}
        for name, steps in sizes.items()
        for count, step_s in zip((4, 1), steps)
    ]
    figure = plots.step_by_micro_batches(rows)
    lines = {name: line.get_xydata().tolist() for name, line in lines_of(figure).items()}
    assert lines["gpipe"] == [[1, 10], [4, 7]]
    assert lines["1f1b"] == [[1, 8.5], [4, 9.5]]
    assert lines["gpipe, theory"] == [[1, 5], [4, 5]]
    assert "gpipe is fastest with 4 micro-batches, 7 s." in figure.caption
