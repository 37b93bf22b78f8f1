from types import SimpleNamespace

import numpy as np
import pytest
from parts import EPOCHS, legend_of

from workbook import plots


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

    def test_runs_differ_in_marker_and_line_too(self):
        lines = plots.learning_curves(dict.fromkeys("abcdefg", EPOCHS)).figure.axes[0].lines
        assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 7

    def test_an_epoch_without_accuracy_is_a_gap(self):
        epochs = [EPOCHS[0] | {"test_accuracy": None}, EPOCHS[1]]
        figure = plots.learning_curves({"a": epochs})
        assert np.isnan(figure.figure.axes[2].lines[0].get_ydata()[0])
        assert figure.png()

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no runs"):
            plots.learning_curves({})
        with pytest.raises(ValueError, match="a has no epochs"):
            plots.learning_curves({"a": []})
        with pytest.raises(ValueError, match="a has epochs without test_accuracy, seconds"):
            plots.learning_curves({"a": [{"loss": 1}]})
