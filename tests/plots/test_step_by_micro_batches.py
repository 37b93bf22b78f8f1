import numpy as np
import pytest

from workbook import plots

ROWS = [
    {"schedule": "gpipe", "micro_batches": 4, "step_s": [6, 7, 8, 9, 30], "model_s": 5.0},
    {"schedule": "gpipe", "micro_batches": 1, "step_s": 10.0, "model_s": 8.0},
    {"schedule": "1f1b", "micro_batches": 1, "step_s": 9.5, "memory_bytes": [2**20, 3 * 2**20]},
    {"schedule": "1f1b", "micro_batches": 4, "step_s": 8.5, "memory_bytes": [2**20, 2**20]},
]


class TestStepByMicroBatches:
    def test_points_are_medians_and_bands_the_middle_half(self):
        axes = plots.step_by_micro_batches(ROWS).figure.axes[0]
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        assert lines["gpipe"] == [[1, 10], [4, 8]]
        assert lines["gpipe model"] == [[1, 8], [4, 5]]
        assert lines["1f1b"] == [[1, 9.5], [4, 8.5]]
        dashed = [line.get_label() for line in axes.lines if line.get_linestyle() == "--"]
        assert dashed == ["gpipe model"]
        ys = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (ys.min(), ys.max()) == (7, 10)

    def test_memory_is_the_largest_stages(self):
        figure = plots.step_by_micro_batches(ROWS)
        memory = figure.figure.axes[1]
        curves = [line.get_xydata() for line in memory.lines if len(line.get_xdata())]
        np.testing.assert_allclose(curves, [[[1, 3], [4, 1]]])
        assert memory.get_ylabel() == "memory (MiB)"
        assert len(plots.step_by_micro_batches(ROWS[:2]).figure.axes) == 1

    def test_words_name_the_fastest(self):
        figure = plots.step_by_micro_batches(ROWS)
        assert "gpipe is fastest with 4 micro-batches, 8 s;" in figure.caption
        assert "4 micro-batches, 8.5 s and 1 MiB" in figure.caption
        assert "gpipe: 10 s with 1, 8 s with 4" in figure.alt

    def test_no_rows_are_refused(self):
        with pytest.raises(ValueError, match="no rows to draw"):
            plots.step_by_micro_batches([])
