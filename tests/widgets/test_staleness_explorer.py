import html
import math

import pytest
from shown import alt_of, drawings

from workbook import plots, widgets


@pytest.fixture
def staleness():
    made = widgets.staleness_explorer(workers=3, factor=4)
    yield made
    made.close()


class TestStalenessExplorer:
    def test_every_slider_shows_its_static_twin(self, staleness):
        assert alt_of(staleness) == plots.staleness_model(3, 4, None).alt
        staleness.bound.value = 5
        assert alt_of(staleness) == plots.staleness_model(3, 4, 5).alt
        staleness.factor.value = 99
        twin = plots.staleness_model(3, 8, 5)
        assert alt_of(staleness) == twin.alt
        assert html.escape(twin.caption) in staleness.view.value

    def test_another_number_of_workers_keeps_the_bound_in_its_range(self, staleness):
        drawn = drawings(staleness)
        staleness.bound.value = 2
        staleness.workers.value = 5
        assert staleness.bound.value == 4, "the least that five workers can keep"
        staleness.workers.value = 2
        assert staleness.bound.value == 4
        assert drawn == [(3, 4, 2), (5, 4, 4), (2, 4, 4)], "each once, and never a mixture"
        staleness.bound.value = math.inf
        staleness.workers.value = 6
        assert drawn[-1] == (6, 4, None)

    @pytest.mark.parametrize(
        ("start", "message"),
        [
            ({"workers": 1}, "2 to 6 workers, got 1"),
            ({"factor": 2.5}, "integer from 1 to 8, got 2.5"),
            ({"bound": 1}, "at most 1 cannot be kept with 3 workers"),
            ({"bound": 99}, "beyond the slider's 13: use None"),
        ],
    )
    def test_a_start_out_of_range_is_refused(self, start, message):
        with pytest.raises(ValueError, match=message):
            widgets.staleness_explorer(**start)
