import html

import pytest
from shown import alt_of

from workbook import plots, widgets


@pytest.fixture
def explorer():
    made = widgets.bucket_explorer()
    yield made
    made.close()


class TestBucketExplorer:
    def test_every_control_shows_its_static_twin(self, explorer):
        assert alt_of(explorer) == plots.bucket_overlap(25, 4, "10 Gb/s network").alt
        explorer.size.value = 4
        assert alt_of(explorer) == plots.bucket_overlap(4, 4, "10 Gb/s network").alt
        explorer.ranks.value = 99
        assert alt_of(explorer) == plots.bucket_overlap(4, 16, "10 Gb/s network").alt
        explorer.link.value = "1 Gb/s network"
        twin = plots.bucket_overlap(4, 16, "1 Gb/s network")
        assert alt_of(explorer) == twin.alt
        assert html.escape(twin.caption) in explorer.view.value

    @pytest.mark.parametrize(
        ("start", "message"),
        [
            ({"bucket_mb": 3}, "the slider has no 3 MiB: choose one of 0, 0.25"),
            ({"world_size": 1}, "2 to 16 ranks, got 1"),
            ({"link": "pigeon"}, "unknown link 'pigeon'"),
        ],
    )
    def test_a_start_out_of_range_is_refused(self, start, message):
        with pytest.raises(ValueError, match=message):
            widgets.bucket_explorer(**start)
