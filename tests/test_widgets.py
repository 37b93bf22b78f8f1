import html
import math
import re

import pytest

from labkit import plots, widgets


@pytest.fixture
def stepper():
    made = widgets.ring_stepper(world_size=4)
    yield made
    made.close()


def alt_of(stepper):
    (alt,) = re.findall(r'<img alt="([^"]+)"', stepper.view.value)
    return html.unescape(alt)


def drawings(monkeypatch):
    """The (step, ranks) of each figure drawn from now on."""
    drawn, draw = [], plots.ring_step

    def counted(step, world_size, values=None):
        drawn.append((step, world_size))
        return draw(step, world_size, values)

    monkeypatch.setattr(plots, "ring_step", counted)
    return drawn


class TestRingStepper:
    def test_it_starts_at_the_start(self, stepper):
        assert (stepper.step.value, stepper.step.min, stepper.step.max) == (0, 0, 6)
        assert (stepper.ranks.value, stepper.ranks.min, stepper.ranks.max) == (4, 2, 6)
        assert list(stepper.children) == [stepper.step, stepper.ranks, stepper.view]

    @pytest.mark.parametrize("world_size", [2, 4, 6])
    def test_every_step_shows_its_static_twin(self, world_size):
        stepper = widgets.ring_stepper(world_size)
        for step in range(2 * world_size - 1):
            stepper.step.value = step
            twin = plots.ring_step(step, world_size)
            assert alt_of(stepper) == twin.alt
            assert html.escape(twin.caption) in stepper.view.value
        stepper.close()

    def test_screen_readers_are_told_of_a_new_caption(self, stepper):
        assert '<figcaption role="status" aria-live="polite"' in stepper.view.value

    def test_another_world_size_keeps_the_step_in_range(self, stepper):
        stepper.step.value = 6
        stepper.ranks.value = 2
        assert (stepper.step.value, stepper.step.max) == (2, 2)
        assert alt_of(stepper) == plots.ring_step(2, 2).alt
        stepper.ranks.value = 6
        assert (stepper.step.value, stepper.step.max) == (2, 10)
        assert alt_of(stepper) == plots.ring_step(2, 6).alt

    def test_values_out_of_range_become_the_nearest(self, stepper):
        stepper.step.value = 99
        stepper.ranks.value = 99
        assert (stepper.step.value, stepper.ranks.value) == (6, 6)
        stepper.step.value = -5
        stepper.ranks.value = -5
        assert (stepper.step.value, stepper.ranks.value) == (0, 2)
        assert alt_of(stepper) == plots.ring_step(0, 2).alt

    def test_the_last_value_applies(self, stepper):
        for step in (1, 5, 2, 6, 3):
            stepper.step.value = step
        assert alt_of(stepper) == plots.ring_step(3, 4).alt

    def test_a_change_draws_once_and_never_a_mixture(self, stepper, monkeypatch):
        stepper.step.value = 6
        drawn = drawings(monkeypatch)
        stepper.ranks.value = 2
        assert drawn == [(2, 2)]

    def test_what_was_seen_is_not_drawn_again(self, stepper, monkeypatch):
        stepper.step.value = 1
        drawn = drawings(monkeypatch)
        stepper.step.value = 0
        stepper.step.value = 1
        assert not drawn

    def test_it_is_read_as_text_where_there_is_no_browser(self, stepper):
        text = "[sliders] step 0 to 6, ranks 2 to 6. "
        assert repr(stepper) == text + plots.ring_words(0, 4)
        bundle = stepper._repr_mimebundle_()
        assert bundle["text/plain"] == repr(stepper)
        assert "application/vnd.jupyter.widget-view+json" in bundle
        stepper.step.value = 3
        assert repr(stepper) == text + plots.ring_words(3, 4)

    def test_own_numbers_bound_the_ranks(self):
        values = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
        stepper = widgets.ring_stepper(3, values)
        assert stepper.ranks.max == 3
        stepper.step.value = 4
        assert "rank 2 holds 111, 222, 333" in alt_of(stepper)
        stepper.ranks.value = 2
        assert alt_of(stepper) == plots.ring_step(2, 2, [[1, 2], [10, 20]]).alt
        stepper.close()

    @pytest.mark.parametrize("world_size", [1, 7, 2.5])
    def test_a_wrong_world_size_is_refused(self, world_size):
        with pytest.raises(ValueError, match=f"shows 2 to 6 ranks, got world_size {world_size}"):
            widgets.ring_stepper(world_size)

    def test_wrong_values_are_refused(self):
        with pytest.raises(ValueError, match="the values are for 2 ranks, got world_size 4"):
            widgets.ring_stepper(values=[[1, 2], [3, 4]])
        with pytest.raises(ValueError, match=r"values must be 3 rows .ranks. of 3"):
            widgets.ring_stepper(2, [[1, 2], [3, 4], [5, 6]])

    def test_closed_it_leaves_no_observer_and_no_widget(self):
        stepper = widgets.ring_stepper(3)
        stepper.close()
        shown = stepper.view.value
        stepper.step.value = 2
        stepper.ranks.value = 2
        assert stepper.view.value == shown
        assert [child.comm for child in (stepper, *stepper.children)] == [None] * 4
        stepper.close()  # a second time does no harm

    def test_two_do_not_answer_to_each_other(self, stepper):
        other = widgets.ring_stepper(world_size=4)
        other.step.value = 5
        assert stepper.step.value == 0
        assert alt_of(stepper) == plots.ring_step(0, 4).alt
        other.close()


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
        assert '<figcaption role="status" aria-live="polite"' in staleness.view.value

    def test_another_number_of_workers_keeps_the_bound_in_its_range(self, staleness, monkeypatch):
        drawn, draw = [], plots.staleness_model
        monkeypatch.setattr(
            plots, "staleness_model", lambda *key: (drawn.append(key), draw(*key))[1]
        )
        staleness.bound.value = 2
        staleness.workers.value = 5
        assert staleness.bound.value == 4, "the least that five workers can keep"
        staleness.workers.value = 2
        assert staleness.bound.value == 4
        assert drawn == [(3, 4, 2), (5, 4, 4), (2, 4, 4)], "each once, and never a mixture"
        staleness.bound.value = math.inf
        staleness.workers.value = 6
        assert drawn[-1] == (6, 4, None)

    def test_it_is_read_as_text_where_there_is_no_browser(self, staleness):
        assert repr(staleness).startswith("[sliders] workers 2 to 6")
        assert repr(staleness).endswith(plots.staleness_model(3, 4).caption)
        assert staleness._repr_mimebundle_()["text/plain"] == repr(staleness)

    @pytest.mark.parametrize(
        ("start", "message"),
        [
            ({"workers": 1}, "2 to 6 workers, got 1"),
            ({"factor": 2.5}, "whole number from 1 to 8, got 2.5"),
            ({"bound": 1}, "at most 1 cannot be kept with 3 workers"),
            ({"bound": 99}, "beyond the slider's 13: use None"),
        ],
    )
    def test_a_start_out_of_range_is_refused(self, start, message):
        with pytest.raises(ValueError, match=message):
            widgets.staleness_explorer(**start)


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

    def test_screen_readers_are_told_of_a_new_caption(self, explorer):
        assert '<figcaption role="status" aria-live="polite"' in explorer.view.value

    def test_what_was_seen_is_not_drawn_again(self, explorer, monkeypatch):
        explorer.size.value = 1
        first = explorer.view.value
        monkeypatch.setattr(plots, "bucket_overlap", None)
        explorer.size.value = 25
        explorer.size.value = 1
        assert explorer.view.value == first

    def test_it_is_read_as_text_where_there_is_no_browser(self, explorer):
        words = plots.bucket_overlap(25, 4, "10 Gb/s network").caption
        assert repr(explorer).startswith("[sliders] bucket, ranks 2 to 16, link (shared memory")
        assert repr(explorer).endswith(words)
        assert explorer._repr_mimebundle_()["text/plain"] == repr(explorer)

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
