import pytest
from parts import TRACE

from workbook import plots


class TestPhases:
    def test_parts_are_the_seconds_by_kind(self):
        axes = plots.phases(TRACE).figure.axes[0]
        containers = {c.get_label() for c in axes.containers}
        assert containers == {"compute", "communicate", "wait"}
        by_rank = [
            sum(p.get_width() for p in axes.patches if round(p.get_y() + 0.36) == rank)
            for rank in (0, 1)
        ]
        assert by_rank == pytest.approx([5, 5])

    def test_bars_stand_end_to_end(self):
        row = [p for p in plots.phases({"compute": 3, "wait": 1}).figure.axes[0].patches]
        assert [(p.get_x(), p.get_width()) for p in row] == [(0, 3), (3, 1)]

    def test_takes_seconds_by_kind_and_by_name(self):
        figure = plots.phases({"ring": {"compute": 3, "wait": 1}, 2: {"compute": 2.0}})
        assert "ring 4 s, compute 75%, wait 25%; rank 2 2 s, compute 100%" in figure.alt
        assert "longest bar is ring (4 s), the shortest rank 2 (2 s)." in figure.caption
        labels = [tick.get_text() for tick in figure.figure.axes[0].get_yticklabels()]
        assert labels == ["ring", "rank 2"]

    def test_a_bar_without_time_is_fine(self):
        assert "idle" not in plots.phases({"busy": {"compute": 1}, "idle": {}}).alt

    @pytest.mark.parametrize("empty", [{}, {"compute": 0.0}, {0: {}}])
    def test_nothing_to_draw_names_the_next_step(self, empty):
        with pytest.raises(ValueError, match="nothing to draw: give what"):
            plots.phases(empty)
