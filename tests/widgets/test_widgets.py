import base64
import html
import math
import re
import threading

import ipywidgets
import pytest
from splits import LINK, PROFILE, measured

from labkit import plots, widgets
from labkit.costs.link import Link
from labkit.errors import WorkerError
from labkit.placement.planner import best_split, predict_split
from labkit.widgets.planner import LINKS


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """What is shown is told by its alt text and caption; how pictures look is test_plots'."""
    monkeypatch.setattr(plots.CaptionedFigure, "png", lambda figure: b"a picture")


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

    @pytest.mark.parametrize("world_size", [2, 6])
    def test_every_step_shows_its_static_twin(self, world_size):
        stepper = widgets.ring_stepper(world_size)
        for step in range(2 * world_size - 1):
            stepper.step.value = step
            twin = plots.ring_step(step, world_size)
            assert alt_of(stepper) == twin.alt
            assert html.escape(twin.caption) in stepper.view.value
        stepper.close()

    def test_the_picture_is_the_static_twins(self, monkeypatch):
        monkeypatch.undo()
        stepper = widgets.ring_stepper(3)
        assert base64.b64encode(plots.ring_step(0, 3).png()).decode() in stepper.view.value
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
    made = widgets.split_explorer(PROFILE, LINK, split_points=(2,), measure=runs)
    yield made
    made.close()


def said(explorer):
    return html.unescape(re.sub("<[^>]+>", "", explorer.status.value))


class TestSplitExplorer:
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
        assert '<figcaption role="status" aria-live="polite"' in splits.view.value

    def test_the_layer_behind_a_cut_is_named(self, splits):
        assert splits.cuts.rows[0].children[1].value == "layer 2: layer 2"
        splits.cuts.sliders[0].value = 4
        assert splits.cuts.rows[0].children[1].value == "layer 4: layer 4"

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

    def test_a_cut_pushes_the_others_and_they_stay_in_order(self, splits, monkeypatch):
        splits.stages.value = 4
        first, second, third = splits.cuts.sliders
        drawn, draw = [], plots.split_costs
        monkeypatch.setattr(
            plots, "split_costs", lambda *args, **kw: (drawn.append(args), draw(*args, **kw))[1]
        )
        third.value = 3
        assert splits.cuts.points == (1, 2, 3)
        first.value = 3
        assert splits.cuts.points == (3, 4, 5)
        second.value = 2
        assert splits.cuts.points == (1, 2, 5)
        assert [split.split_points for _, split, _ in drawn] == [(1, 2, 3), (3, 4, 5), (1, 2, 5)]
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
        scales = []
        for point in (1, 3, 5):
            splits.cuts.sliders[0].value = point
            split = predict_split(PROFILE, (point,), LINK)
            values = {"step": split.step_s, "activation": split.hop_s[0]}
            boxes = splits.figure(*splits.chosen()).figure.boxes
            found = {name: box for (name, _), (box, *_) in boxes.items() if name in values}
            scales.append(
                [(found[name].top - found[name].bottom) / values[name] for name in values]
            )
        assert scales[0] == pytest.approx(scales[1])
        assert scales[0] == pytest.approx(scales[2])

    def test_run_lays_the_measured_bars_beside(self, splits, runs):
        splits.run.click()
        (call,) = runs.calls
        options = {"batch_size": 16, "micro_batches": 1, "schedule": "gpipe"}
        options |= {"input_shape": (3, 32, 32), "frozen": 0}
        assert call == ("toy", (2,), options)
        split = predict_split(PROFILE, (2,), LINK)
        twin = plots.split_costs(PROFILE, split, measured(split))
        assert alt_of(splits) == twin.alt
        assert html.escape(twin.caption) in splits.view.value
        assert said(splits) == "measured, cut before layer 2: 172 ms a step"
        assert repr(splits).endswith(twin.caption)

    def test_measured_bars_are_there_only_where_they_were_measured(self, splits):
        splits.run.click()
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
            seen.append((splits.run.disabled, splits.best.disabled, said(splits)))
            splits.run.click()
            splits.best.click()

        runs.during = during
        splits.run.click()
        assert seen == [(True, True, "measuring ...")]
        assert (splits.run.disabled, splits.best.disabled) == (False, False)
        assert len(runs.calls) == 1

    def test_what_is_chosen_during_a_run_is_shown_after_it(self, splits, runs):
        runs.during = lambda: setattr(splits.cuts.sliders[0], "value", 4)
        splits.run.click()
        assert "cut before layer 4" in alt_of(splits)
        assert "Measured" not in alt_of(splits)
        assert "cut before layer 2" in said(splits)
        splits.cuts.sliders[0].value = 2
        assert "Measured" in alt_of(splits)

    def test_an_error_of_the_run_is_said_and_the_next_press_works(self, splits, runs):
        before = splits.view.value
        runs.problem = WorkerError("rank 1 <died>")
        splits.run.click()
        assert said(splits) == "WorkerError: rank 1 <died>"
        assert "&lt;died&gt;" in splits.status.value
        assert splits.view.value == before
        assert not splits.run.disabled
        runs.problem = None
        splits.run.click()
        assert "Measured" in alt_of(splits)

    def test_the_stop_button_leaves_working_buttons(self, splits, runs):
        runs.problem = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            splits.run.click()
        assert (said(splits), splits.run.disabled, splits.best.disabled) == (
            "stopped",
            False,
            False,
        )
        runs.problem = None
        splits.run.click()
        assert said(splits).startswith("measured")

    @pytest.mark.parametrize("objective", ["step", "largest_stage"])
    def test_best_moves_the_cuts_there(self, splits, objective):
        splits.stages.value = 3
        splits.micro_batches.value = 4
        splits.objective.value = objective
        splits.best.click()
        best = best_split(PROFILE, 3, LINK, objective=objective, micro_batches=4)
        assert splits.cuts.points == best.split_points
        assert f"cut before layers {best.split_points[0]}, {best.split_points[1]}" in said(splits)
        assert alt_of(splits) == plots.split_costs(PROFILE, best).alt

    def test_best_keeps_the_cap_or_says_that_it_cannot_be_kept(self, splits):
        labels = [label for label, _ in splits.cap.options]
        assert labels[-1] == "no limit"
        cap = splits.cap.options[-2][1]
        splits.cap.value = cap
        splits.best.click()
        assert max(predict_split(PROFILE, splits.cuts.points, LINK).memory_bytes) <= cap
        splits.cap.value = splits.cap.options[0][1]
        points = splits.cuts.points
        splits.best.click()
        assert said(splits).startswith("ValueError: no split into 2 stages keeps every stage")
        assert splits.cuts.points == points

    def test_it_is_read_as_text_where_there_is_no_browser(self, splits):
        text = repr(splits)
        assert text.startswith("[sliders and buttons] stages 2 to 4, a cut before any of 6 layers")
        assert "link (this machine, NVLink 4, PCIe 4 x16, 10 GbE, 1 GbE)" in text
        assert text.endswith(
            plots.split_costs(PROFILE, predict_split(PROFILE, (2,), LINK)).caption
        )
        assert splits._repr_mimebundle_()["text/plain"] == text

    def test_without_a_link_of_this_machine_there_are_the_others(self, runs):
        explorer = widgets.split_explorer(PROFILE, split_points=(2, 4), frozen=2, measure=runs)
        assert explorer.link.options == tuple(LINKS)
        split = predict_split(PROFILE, (2, 4), LINKS["NVLink 4"], frozen=2)
        assert alt_of(explorer) == plots.split_costs(PROFILE, split).alt
        explorer.run.click()
        assert runs.calls[0][2]["frozen"] == 2
        assert "Measured" in alt_of(explorer)
        explorer.close()

    def test_faster_links_have_shorter_hops(self):
        seconds = [link.message_seconds(2**20) for link in LINKS.values()]
        assert seconds == sorted(seconds)
        assert all(isinstance(link, Link) for link in LINKS.values())

    def test_closed_it_leaves_nothing(self, runs):
        before = set(ipywidgets.widgets.widget._instances)
        explorer = widgets.split_explorer(PROFILE, LINK, measure=runs)
        assert explorer.cuts.points == (3,), "in the middle, where nothing is said"
        shown = explorer.view.value
        explorer.close()
        assert set(ipywidgets.widgets.widget._instances) == before
        explorer.cuts.sliders[0].value = 1
        explorer.stages.value = 3
        explorer.run.click()
        assert not runs.calls
        assert explorer.view.value == shown
        explorer.close()

    def test_a_press_in_another_thread_meanwhile_does_nothing(self, splits, runs):
        def during():
            thread = threading.Thread(target=splits.run.click)
            thread.start()
            thread.join()

        runs.during = during
        splits.run.click()
        assert len(runs.calls) == 1

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
    def test_a_start_out_of_range_is_refused(self, start, message):
        with pytest.raises(ValueError, match=message):
            widgets.split_explorer(PROFILE, LINK, **start)
