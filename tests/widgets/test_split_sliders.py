import html
import re
import threading

import pytest
from shown import alt_of, drawings
from splits import LINK, PROFILE, measured

from labkit.errors import WorkerError
from labkit.placement.planner import best_split, predict_split
from workbook import plots, widgets
from workbook.widgets.split_choice import LINKS


class Runs:
    """Stands for ``measure_split``: remembers its calls, and measures twice what is predicted."""

    def __init__(self):
        self.calls, self.problem, self.during = [], None, lambda: None

    def __call__(self, model, split_points, **options):
        self.calls.append((model, split_points, options))
        self.during()
        if self.problem:
            raise self.problem
        size, settings = options["batch_size"], ("micro_batches", "schedule", "frozen")
        split = predict_split(
            PROFILE, split_points, LINK, **{name: options[name] for name in settings}
        )
        return measured(split, factor=2.0, batch_size=size)


@pytest.fixture
def runs():
    return Runs()


@pytest.fixture
def splits(runs):
    made = widgets.split_explorer(PROFILE, LINK, split_points=(2,), measure=runs, picture=False)
    yield made
    made.close()


def press(explorer, name):
    """Press a button, and wait until its work has ended."""
    getattr(explorer, name).click()
    explorer.join()


def said(explorer):
    return html.unescape(re.sub("<[^>]+>", "", explorer.status.value))


class TestSplitSliders:
    def test_every_control_changes_the_model_that_is_shown(self, splits):
        def shown(points, link=LINK, profile=PROFILE, **options):
            split = predict_split(profile, points, link, **options)
            return plots.split_costs(profile, split).alt

        assert alt_of(splits) == shown((2,))
        splits.cuts.sliders[0].value = 4
        assert alt_of(splits) == shown((4,))
        splits.link.value = "1 GbE"
        assert alt_of(splits) == shown((4,), LINKS["1 GbE"])
        splits.micro_batches.value = 4
        splits.schedule.value = "1f1b"
        assert alt_of(splits) == shown((4,), LINKS["1 GbE"], micro_batches=4, schedule="1f1b")

    def test_another_batch_is_in_proportion_and_says_so(self, splits):
        splits.batch.value = 32
        assert "batch of 32. Predicted step 170 ms; stage 0 64 ms" in alt_of(splits)
        assert "16 MiB a way" in alt_of(splits)
        assert "batch of 32, scaled from 16" in repr(splits)

    def test_as_many_sliders_as_cuts_are_shown(self, splits):
        def shown():
            return [row.layout.display != "none" for row in splits.cuts.rows]

        assert (shown(), splits.cuts.points) == ([True, False, False], (2,))
        splits.stages.value = 4
        assert (shown(), splits.cuts.points) == ([True] * 3, (2, 4, 5))
        splits.stages.value = 3
        assert (shown(), splits.cuts.points) == ([True, True, False], (2, 4))

    def test_every_stage_keeps_a_layer(self, splits):
        splits.cuts.sliders[0].value = 99
        assert splits.cuts.points == (5,)
        splits.stages.value = 3
        assert splits.cuts.points == (4, 5)
        splits.stages.value = 4
        assert splits.cuts.points == (3, 4, 5)
        ranges = [(slider.min, slider.max) for slider in splits.cuts.sliders]
        assert ranges == [(1, 3), (2, 4), (3, 5)]

    def test_a_cut_pushes_the_others_and_they_stay_in_order(self, splits):
        splits.stages.value = 4
        first, second, third = splits.cuts.sliders
        drawn = drawings(splits)
        third.value = 3
        assert splits.cuts.points == (1, 2, 3)
        first.value = 3
        assert splits.cuts.points == (3, 4, 5)
        second.value = 2
        assert splits.cuts.points == (1, 2, 5)
        assert [points for points, *_ in drawn] == [(1, 2, 3), (3, 4, 5), (1, 2, 5)]
        names = [row.children[1].value for row in splits.cuts.rows]
        assert names == ["layer 1: layer 1", "layer 2: layer 2", "layer 5: layer 5"]

    def test_a_batch_has_a_sample_for_each_micro_batch(self, splits):
        splits.batch.value = 4
        splits.micro_batches.value = 16
        assert splits.batch.value == 16
        splits.batch.value = 8
        assert splits.micro_batches.value == 8
        assert "batch of 8 in 8 micro-batches" in alt_of(splits)

    def test_bars_and_not_axes_move_with_a_cut(self, splits):
        limits, heights = set(), set()
        for point in (1, 3, 5):
            splits.cuts.sliders[0].value = point
            _, *panels = splits.draw(*splits.chosen()).figure.axes
            limits.add(tuple(axes.get_ylim() for axes in panels))
            heights.add(tuple(axes.patches[0].get_height() for axes in panels))
        assert len(limits) == 1
        assert len(heights) == 3

    def test_run_lays_the_measured_bars_beside(self, splits, runs):
        press(splits, "run")
        (call,) = runs.calls
        options = {"batch_size": 16, "micro_batches": 1, "schedule": "gpipe"}
        options |= {"input_shape": (3, 32, 32), "frozen": 0}
        assert call == ("toy", (2,), options)
        split = predict_split(PROFILE, (2,), LINK)
        twin = plots.split_costs(PROFILE, split, measured(split))
        assert alt_of(splits) == twin.alt
        assert html.escape(twin.caption) in splits.view.value
        assert said(splits) == "measured, cut before layer 2: 172 ms per step"
        assert repr(splits).endswith(twin.caption)

    def test_measured_bars_are_there_only_where_they_were_measured(self, splits):
        press(splits, "run")
        for control, other, back in (
            (splits.cuts.sliders[0], 3, 2),
            (splits.stages, 3, 2),
            (splits.micro_batches, 2, 1),
            (splits.schedule, "1f1b", "gpipe"),
            (splits.batch, 32, 16),
        ):
            assert "Measured" in alt_of(splits)
            control.value = other
            assert "Measured" not in alt_of(splits)
            control.value = back
        splits.link.value = "NVLink 4"
        assert "Measured" in alt_of(splits)
        assert "measured on this machine, not over NVLink 4." in splits.view.value

    def test_buttons_are_off_while_it_measures_and_another_press_does_nothing(self, splits, runs):
        seen = []

        def during():
            buttons = splits.run, splits.best, splits.stop
            seen.append(([button.disabled for button in buttons], said(splits)))
            splits.run.click()
            splits.best.click()

        runs.during = during
        press(splits, "run")
        assert seen == [([True, True, False], "measuring ...")]
        assert (splits.run.disabled, splits.best.disabled, splits.stop.disabled) == (0, 0, 1)
        assert len(runs.calls) == 1

    def test_what_is_chosen_during_a_run_is_shown_after_it(self, splits, runs):
        runs.during = lambda: setattr(splits.cuts.sliders[0], "value", 4)
        press(splits, "run")
        assert "cut before layer 4" in alt_of(splits)
        assert "Measured" not in alt_of(splits)
        assert "cut before layer 2" in said(splits)
        splits.cuts.sliders[0].value = 2
        assert "Measured" in alt_of(splits)

    def test_an_error_of_the_run_is_said_and_the_next_press_works(self, splits, runs):
        before = splits.view.value
        runs.problem = WorkerError("rank 1 <died>")
        press(splits, "run")
        assert said(splits) == "WorkerError: rank 1 <died>"
        assert "&lt;died&gt;" in splits.status.value
        assert splits.view.value == before
        runs.problem = None
        press(splits, "run")
        assert "Measured" in alt_of(splits)

    def test_stop_ends_the_run_and_leaves_working_buttons(self, splits, runs):
        measuring = threading.Event()

        def during():
            measuring.set()
            while True:
                threading.Event().wait(0.01)

        runs.during = during
        splits.run.click()
        measuring.wait()
        splits.stop.click()
        splits.join()
        assert said(splits) == "stopped"
        assert "Measured" not in alt_of(splits)
        runs.during = lambda: None
        press(splits, "run")
        assert said(splits).startswith("measured")

    @pytest.mark.parametrize("objective", ["step", "largest_stage"])
    def test_best_moves_the_cuts_there(self, splits, objective):
        splits.stages.value = 3
        splits.micro_batches.value = 4
        splits.objective.value = objective
        press(splits, "best")
        best = best_split(PROFILE, 3, LINK, objective=objective, micro_batches=4)
        assert splits.cuts.points == best.split_points
        assert f"cut before layers {best.split_points[0]}, {best.split_points[1]}" in said(splits)
        assert alt_of(splits) == plots.split_costs(PROFILE, best).alt

    def test_best_keeps_the_cap_or_says_that_it_cannot_be_kept(self, splits):
        labels = [label for label, _ in splits.cap.options]
        assert labels[-1] == "no limit"
        cap = splits.cap.options[-2][1]
        splits.cap.value = cap
        press(splits, "best")
        assert max(predict_split(PROFILE, splits.cuts.points, LINK).memory_bytes) <= cap
        splits.cap.value = splits.cap.options[0][1]
        points = splits.cuts.points
        press(splits, "best")
        assert said(splits).startswith("ValueError: no split into 2 stages keeps every stage")
        assert splits.cuts.points == points

    def test_it_is_read_as_text_where_there_is_no_browser(self, splits):
        text = repr(splits)
        assert "stages 2 to 4, a cut before any of 6 layers" in text
        assert "link (this machine, NVLink 4, PCIe 4 x16, 10 GbE, 1 GbE)" in text
        assert text.endswith(
            plots.split_costs(PROFILE, predict_split(PROFILE, (2,), LINK)).caption
        )

    def test_without_a_link_of_this_machine_there_are_the_others(self, runs):
        explorer = widgets.split_explorer(
            PROFILE, split_points=(2, 4), frozen=2, measure=runs, picture=False
        )
        assert explorer.link.options == tuple(LINKS)
        split = predict_split(PROFILE, (2, 4), LINKS["NVLink 4"], frozen=2)
        assert alt_of(explorer) == plots.split_costs(PROFILE, split).alt
        press(explorer, "run")
        assert runs.calls[0][2]["frozen"] == 2
        assert "Measured" in alt_of(explorer)
        explorer.close()

    def test_faster_links_have_shorter_hops(self):
        seconds = [link.message_seconds(2**20) for link in LINKS.values()]
        assert seconds == sorted(seconds)

    def test_closed_its_buttons_do_nothing(self, runs):
        explorer = widgets.split_explorer(PROFILE, LINK, measure=runs, picture=False)
        assert explorer.cuts.points == (3,), "in the middle, where nothing is said"
        explorer.close()
        press(explorer, "run")
        assert not runs.calls

    @pytest.mark.parametrize(
        ("start", "message"),
        [
            ({"split_points": (0,)}, "split point 0 leaves a stage without layers"),
            ({"split_points": (4, 2)}, "out of order"),
            ({"split_points": ()}, "shows 2 to 4 stages, got 1"),
            ({"split_points": (1, 2, 3, 4)}, "shows 2 to 4 stages, got 5"),
            ({"micro_batches": 3}, "one of 1, 2, 4, 8, 16 for a batch of 16, got 3"),
            ({"schedule": "zigzag"}, "unknown schedule 'zigzag': choose one of gpipe, 1f1b"),
            ({"frozen": 7}, "frozen must be an integer from 0 to 6"),
        ],
    )
    @pytest.mark.parametrize("picture", [False, None])
    def test_a_start_out_of_range_is_refused(self, start, message, picture):
        with pytest.raises(ValueError, match=message):
            widgets.split_explorer(PROFILE, LINK, picture=picture, **start)
