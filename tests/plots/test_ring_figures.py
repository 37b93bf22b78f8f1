import re

import pytest
from parts import legend_of

from labkit.schedules.ring import owned_chunk, ring_all_reduce
from workbook import plots


class TestRing:
    def test_states_start_with_own_parts_and_end_complete(self):
        states = plots.ring_states(4)
        assert len(states) == 2 * 3 + 1
        assert [state.complete for state in states] == [0, 0, 0, 4, 8, 12, 16]
        assert all(len(state.messages) == 4 for state in states[1:])

    def test_messages_carry_what_arrived(self):
        for before, after in zip(plots.ring_states(3), plots.ring_states(3)[1:]):
            for src, dst, chunk in after.messages:
                assert before.contributions[src][chunk] <= after.contributions[dst][chunk]

    def test_cells_print_value_and_ranks(self):
        figure = plots.ring_steps(plots.ring_states(2, [[1, 2], [10, 20.5]])[-1:])
        texts = [text.get_text() for text in figure.figure.axes[0].texts if text.get_text()]
        assert texts == ["11", "all", "22.5", "all"] * 2

    def test_messages_are_arrows_and_outlines(self):
        figure = plots.ring_steps(plots.ring_states(2)[1:2])
        axes = figure.figure.axes[0]
        arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
        ends = {(arrow.xyann[1], arrow.xy[1]) for arrow in arrows}
        assert ends == {(0, 1), (1, 0)}
        assert len(axes.patches) == 4 + 2
        assert legend_of(figure) == ["own part only", "sum of all ranks", "just arrived"]

    def test_wrong_inputs_are_refused_with_the_numbers(self):
        with pytest.raises(ValueError, match="at least 2 ranks, got world_size 1"):
            plots.ring_states(1)
        with pytest.raises(ValueError, match="3 rows"):
            plots.ring_states(3, [[1, 2, 3]])
        with pytest.raises(ValueError, match="no states"):
            plots.ring_steps([])


class TestRingStep:
    @pytest.mark.parametrize("world_size", [2, 3, 6])
    def test_the_words_are_the_schedule(self, world_size):
        schedule = [list(ring_all_reduce(rank, world_size)) for rank in range(world_size)]
        last = 2 * (world_size - 1)
        for step in range(1, last + 1):
            words = plots.ring_words(step, world_size)
            moves = [rank_steps[step - 1] for rank_steps in schedule]
            assert words.startswith(f"Step {step} of {last}, {moves[0].phase}: rank 0 sends")
            assert words.count("sends") == world_size
            for rank, move in enumerate(moves):
                assert f"rank {rank} sends chunk {move.send_chunk} to rank {move.dst}" in words

    @pytest.mark.parametrize("world_size", [2, 3, 6])
    def test_the_words_say_who_owns_what(self, world_size):
        halfway = plots.ring_words(world_size - 1, world_size)
        for rank in range(world_size):
            owned = owned_chunk(rank, world_size)
            assert re.search(rf"rank {rank} owns chunk {owned}[;.]", halfway)
        for step in range(world_size - 1):
            assert "owns" not in plots.ring_words(step, world_size)
        end = plots.ring_words(2 * (world_size - 1), world_size)
        assert end.endswith(f"owns the complete sums of all {world_size} chunks.")

    def test_the_digits_of_a_number_are_the_ranks_in_it(self):
        axes = plots.ring_step(2, 4).figure.axes[0]
        texts = [text.get_text() for text in axes.texts if text.get_text()]
        assert texts[:8] == ["1", "0", "2", "0", "3303", "0,2,3", "4004", "0,3"]
        assert axes.get_title(loc="left") == "step 2 of 6: share_reduce"

    @pytest.mark.parametrize("world_size", [2, 4, 6])
    def test_all_steps_have_one_size_and_one_legend(self, world_size):
        figures = [plots.ring_step(s, world_size) for s in range(2 * world_size - 1)]
        places = {tuple(f.figure.axes[0].get_position().bounds) for f in figures}
        assert len({tuple(f.figure.get_size_inches()) for f in figures} | places) == 2
        assert len({tuple(legend_of(figure)) for figure in figures}) == 1
        assert figures[0].figure.get_figwidth() <= 8.5

    @pytest.mark.parametrize(("step", "world_size"), [(1, 2), (3, 4), (4, 6), (7, 6)])
    def test_nothing_overlaps(self, step, world_size):
        figure = plots.ring_step(step, world_size).figure
        figure.draw_without_rendering()
        axes = figure.axes[0]
        cells = [patch.get_window_extent() for patch in axes.patches[: world_size**2]]
        arrows = [
            text.arrow_patch.get_window_extent() for text in axes.texts if not text.get_text()
        ]
        assert len(arrows) == world_size
        texts = [text.get_window_extent() for text in axes.texts if text.get_text()]
        for text in texts:
            assert any(c.x0 < text.x0 and text.x1 < c.x1 for c in cells)
            assert not any(text.overlaps(arrow) for arrow in arrows)
        (legend,) = figure.legends
        below = axes.xaxis.label.get_window_extent().y0
        assert legend.get_window_extent().y1 < below

    def test_a_step_that_is_not_there_is_refused_with_the_range(self):
        for step in (-1, 7, 1.5, "2"):
            with pytest.raises(ValueError, match=r"4 ranks has no step .*0 .* to 6"):
                plots.ring_step(step, 4)
        with pytest.raises(ValueError, match="at least 2 ranks"):
            plots.ring_step(0, 1)
        with pytest.raises(ValueError, match="3 rows"):
            plots.ring_step(0, 3, [[1]])
