import pytest
from parts import UPDATES

from labkit.costs.async_run import simulate
from workbook import plots


class TestStaleness:
    def test_bars_are_the_updates_stacked_by_worker(self):
        axes = plots.staleness_histogram(UPDATES, bound=5).figure.axes[0]
        bars = [(round(b.get_x() + 0.4), b.get_y(), b.get_height()) for b in axes.patches]
        first, second, third = bars[:6], bars[6:12], bars[12:]
        assert [height for _, _, height in first] == [2, 1, 0, 0, 0, 0]
        assert second[1] == (1, 1, 1), "the second worker's update stands on the first one's"
        assert third[3] == (3, 0, 1)
        assert axes.lines[0].get_xdata() == [5.5, 5.5], "right of the last bar that is allowed"

    def test_alt_and_caption_hold_means_and_the_bound(self):
        figure = plots.staleness_histogram(UPDATES, bound=5)
        assert "worker 1: 3 updates, mean staleness 0.3, largest 1" in figure.alt
        assert "Mean staleness 1.00 with 3 workers, largest 3" in figure.caption
        assert "the bound was 5" in figure.caption
        assert "no bound was set" in plots.staleness_histogram(UPDATES).caption

    def test_a_predicted_histogram_says_so(self):
        figure = plots.staleness_histogram(UPDATES, model=True)
        assert figure.alt.startswith("Predicted")
        assert figure.figure.axes[0].get_title(loc="left").endswith("(model)")
        assert all(bar.get_hatch() == "////" for bar in figure.figure.axes[0].patches)

    @pytest.mark.parametrize(("workers", "factor", "bound"), [(1, 1, None), (6, 8, 5), (2, 4, 3)])
    def test_the_model_is_the_simulators(self, workers, factor, bound):
        timetable = simulate(workers, factor=factor, bound=bound)
        figure = plots.staleness_model(workers, factor, bound)
        histogram = figure.figure.axes[1]
        assert sum(bar.get_height() for bar in histogram.patches) == len(timetable.updates)
        assert f"{len(timetable.updates)} gradients are applied" in figure.caption
        lanes = [text.get_text() for text in figure.figure.axes[0].get_yticklabels()]
        assert lanes == ["server", *(f"worker {w}" for w in range(1, workers + 1))]
        assert "(model)" in figure.figure.get_suptitle()

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no updates to draw"):
            plots.staleness_histogram([])
        with pytest.raises(ValueError, match="1 to 6 workers, got 7"):
            plots.staleness_model(7)
        with pytest.raises(ValueError, match="at most 1 cannot be kept with 3 workers"):
            plots.staleness_model(3, 4, 1)
