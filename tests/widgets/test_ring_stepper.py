import html

import pytest
from shown import alt_of, drawings

from workbook import plots, widgets


@pytest.fixture
def stepper():
    made = widgets.ring_stepper(world_size=4)
    yield made
    made.close()


class TestRingStepper:
    def test_it_starts_at_the_start(self, stepper):
        assert (stepper.step.value, stepper.step.min, stepper.step.max) == (0, 0, 6)
        assert (stepper.ranks.value, stepper.ranks.min, stepper.ranks.max) == (4, 2, 6)
        assert list(stepper.children) == [stepper.step, stepper.ranks, stepper.view]

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_every_step_shows_its_static_twin(self, world_size):
        stepper = widgets.ring_stepper(world_size)
        for step in range(2 * world_size - 1):
            stepper.step.value = step
            twin = plots.ring_step(step, world_size)
            assert alt_of(stepper) == twin.alt
            assert html.escape(twin.caption) in stepper.view.value
        stepper.close()

    def test_another_world_size_keeps_the_step_in_range(self, stepper):
        stepper.step.value = 6
        drawn = drawings(stepper)
        stepper.ranks.value = 2
        assert drawn == [(2, 2)], "once, and never a mixture"
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
