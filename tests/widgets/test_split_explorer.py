"""The kernel's side of the picture; tests/project/test_browser.py tests the browser's."""

import json
import threading
from types import SimpleNamespace

import pytest
from splits import LINK, PROFILE, measured
from torch import nn

from labkit.errors import WorkerError
from labkit.placement.planner import best_split, predict_split
from labkit.units import format_bytes, format_seconds
from workbook import plots, widgets
from workbook.widgets import explorer
from workbook.widgets.split_choice import LINKS


class Runs:
    """Stands for ``measure_split``: measures twice what is predicted."""

    def __init__(self):
        self.calls, self.problem, self.during = [], None, lambda: None

    def __call__(self, model, split_points, **options):
        self.calls.append((model, split_points, options))
        self.during()
        if self.problem:
            raise self.problem
        settings = {name: options[name] for name in ("micro_batches", "schedule", "frozen")}
        split = predict_split(PROFILE, split_points, LINK, **settings)
        return measured(split, factor=2.0, batch_size=options["batch_size"])


@pytest.fixture
def runs():
    return Runs()


@pytest.fixture
def picture(runs):
    made = widgets.split_explorer(PROFILE, LINK, split_points=(2,), measure=runs)
    yield made
    made.close()


def press(picture, kind):
    """What the browser sends when a button is pressed; wait until its work has ended."""
    picture.set_state({"pressed": [kind, 1 + (picture.pressed or [kind, 0])[1]]})
    picture.join()


class TestSplitPicture:
    def test_the_browser_gets_the_predicted_step(self, picture):
        picture.points, picture.micro_batches, picture.schedule = [2, 4], 4, "1f1b"
        shown = picture.get_state()["shown"]
        split = predict_split(PROFILE, (2, 4), LINK, micro_batches=4, schedule="1f1b")
        for stage, row in enumerate(shown["stages"]):
            slots = [slot for slot in split.slots() if slot.stage == stage]
            assert row["model"]["spans"] == [(s.kind, s.start_s, s.end_s) for s in slots]
            assert row["model"]["memory"][1] == format_bytes(split.memory_bytes[stage])
        assert shown["numbers"][0][1] == format_seconds(split.step_s)
        assert shown["numbers"][1][1] == f"{split.bubble:.0%}"
        assert shown["caption"].endswith(plots.split_costs(PROFILE, split).caption)
        assert shown["layers"][0]["bytes"] == PROFILE.layers[0].output_bytes
        assert picture.options["link"] == ["this machine", *LINKS]
        json.dumps(shown)

    def test_every_message_has_its_time(self, runs):
        """What crosses a cut: an activation per micro-batch, and a gradient if there is one."""
        picture = widgets.split_explorer(
            PROFILE, LINK, split_points=(2, 4), micro_batches=4, frozen=2, measure=runs
        )
        first, second = (hop["spans"] for hop in picture.shown["hops"])
        kinds = [[kind for kind, *_ in spans] for spans in (first, second)]
        assert kinds == [["activation"] * 4, ["activation"] * 4 + ["gradient"] * 4]
        slots = predict_split(PROFILE, (2, 4), LINK, micro_batches=4, frozen=2).slots()
        sent = [slot.end_s for slot in slots if slot[:2] == (0, "forward")]
        assert [start for _, start, _ in first] == sent
        assert all(end > start for spans in (first, second) for _, start, end in spans)

    def test_another_batch_is_in_proportion_and_says_so(self, picture):
        picture.batch_size = 32
        assert picture.shown["numbers"][0][1] == "170 ms"
        assert picture.shown["layers"][0]["sends"] == "16 MiB"
        assert "batch of 32, scaled from 16" in picture.shown["title"]

    def test_while_cuts_move_the_axis_never_shrinks(self, picture):
        ends = []
        for point in (1, 3, 5, 1):
            picture.points = [point]
            ends.append(picture.shown["end_s"])
        assert ends == sorted(ends)
        assert ends[-1] > picture.shown["last_s"]

    def test_run_measures_the_split_that_is_shown(self, picture, runs):
        picture.points, picture.micro_batches = [2, 4], 4
        press(picture, "run")
        options = {"batch_size": 16, "micro_batches": 4, "schedule": "gpipe"}
        options |= {"input_shape": (3, 32, 32), "frozen": 0}
        assert runs.calls == [("toy", (2, 4), options)]
        numbers = {name: real for name, _, real in picture.shown["numbers"]}
        split = predict_split(PROFILE, (2, 4), LINK, micro_batches=4)
        assert numbers["step"] == format_seconds(2 * split.step_s)
        assert numbers["bubble: stages idle"] == f"{split.bubble:.0%}"
        assert numbers["all hops"] == format_seconds(2 * sum(split.hop_s + split.backward_hop_s))
        assert picture.status == "measured, cut before layers 2, 4: 98.9 ms per step"

    def test_the_measured_step_is_laid_out_as_it_ran(self, picture):
        press(picture, "run")
        slots = sorted(predict_split(PROFILE, (2,), LINK).slots(), key=lambda s: (s[0], s[3]))
        bars = [
            (stage, *bar)
            for stage, row in enumerate(picture.shown["stages"])
            for bar in row["measured"]["spans"]
        ]
        for (stage, kind, start_s, end_s), slot in zip(bars, slots, strict=True):
            assert (stage, kind) == slot[:2]
            assert (start_s, end_s) == pytest.approx((2 * slot.start_s, 2 * slot.end_s))

    def test_what_was_measured_stays(self, picture):
        press(picture, "run")
        picture.points = [4]
        press(picture, "run")
        assert [choice.points for choice in picture.runs] == [(2,), (4,)]
        picture.points = [2]
        assert "Measured" in repr(picture)
        picture.points = [3]
        assert "Measured" not in repr(picture)
        picture.points, picture.link = [2], "1 GbE"
        assert "Measured" in repr(picture)

    def test_it_says_when_it_is_busy_and_a_second_press_does_nothing(self, picture, runs):
        seen = []

        def during():
            seen.append((picture.busy, picture.status))
            picture.run()

        runs.during = during
        press(picture, "run")
        assert seen == [("measuring ...", "")]
        assert picture.busy == ""
        assert len(runs.calls) == 1

    def test_stop_ends_a_run(self, picture, runs):
        measuring = threading.Event()

        def during():
            measuring.set()
            while True:
                threading.Event().wait(0.01)

        runs.during = during
        picture.run()
        measuring.wait()
        press(picture, "stop")
        assert (picture.status, picture.busy, picture.runs) == ("stopped", "", {})
        runs.during = lambda: None
        press(picture, "run")
        assert picture.status.startswith("measured")

    def test_an_error_of_the_run_is_said(self, picture, runs):
        runs.problem = WorkerError("rank 1 <died>")
        press(picture, "run")
        assert picture.status == "WorkerError: rank 1 <died>"

    @pytest.mark.parametrize("objective", ["step", "largest_stage"])
    def test_best_moves_the_cuts_there_and_says_why(self, picture, objective):
        picture.points, picture.micro_batches, picture.objective = [1, 2], 4, objective
        before = predict_split(PROFILE, (1, 2), LINK, micro_batches=4)
        press(picture, "best")
        best = best_split(PROFILE, 3, LINK, objective=objective, micro_batches=4)
        assert tuple(picture.points) == best.split_points
        a, b = best.split_points
        step = f"step {1e3 * before.step_s:.3g} ms -> {1e3 * best.step_s:.3g} ms"
        said = f"best by the model, cut before layers {a}, {b}: {step}, "
        assert picture.status.startswith(said)
        press(picture, "best")
        assert picture.status.endswith(", where the cuts are already")

    def test_best_keeps_the_cap_or_says_that_it_cannot_be_kept(self, picture):
        picture.cap_bytes = picture.options["cap_bytes"][-2][1]
        press(picture, "best")
        assert max(predict_split(PROFILE, picture.points, LINK).memory_bytes) <= picture.cap_bytes
        points = picture.points
        picture.cap_bytes = picture.options["cap_bytes"][0][1]
        press(picture, "best")
        assert picture.status.startswith("ValueError: no split into 2 stages keeps every stage")
        assert picture.points == points

    def test_what_cannot_be_is_refused(self, picture):
        for name, value, message in (
            ("points", [4, 2], "out of order"),
            ("points", [6], "split point 6 leaves a stage without layers"),
            ("points", [], "shows 2 to 4 stages, got 1"),
            ("link", "string", "unknown link 'string': choose one of this machine"),
            ("micro_batches", 3, "unknown micro_batches 3: choose one of 1, 2, 4, 8, 16"),
        ):
            with pytest.raises(ValueError, match=message):
                setattr(picture, name, value)
        assert picture.chosen().points == (2,)

    def test_ones_own_layers_are_measured_here_and_run(self, runs):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
        shape = {"batch_size": 8, "input_shape": (3, 2, 2)}
        picture = widgets.split_explorer(model, LINK, measure=runs, **shape)
        names = [layer["name"] for layer in picture.shown["layers"]]
        assert names == ["Flatten", "Linear", "ReLU", "Linear"]
        assert (picture.points, picture.batch_size) == ([2], 8)
        press(picture, "run")
        assert (runs.calls[0][0], runs.calls[0][2]["input_shape"]) == (model, (3, 2, 2))
        picture.close()

    def test_it_is_read_as_text_where_there_is_no_browser(self, picture):
        text = repr(picture)
        assert text.startswith("[picture and buttons] stages 2 to 4, a cut before any of 6 layers")
        caption = plots.split_costs(PROFILE, predict_split(PROFILE, (2,), LINK)).caption
        assert text.endswith(caption)
        data, _ = picture._repr_mimebundle_()
        assert data["text/plain"] == text
        assert "application/vnd.jupyter.widget-view+json" in data

    def test_it_keeps_its_state_when_its_cell_is_run_again(self, runs, monkeypatch):
        shell = SimpleNamespace(get_parent=lambda: {"metadata": {"cellId": "the cell"}})
        monkeypatch.setattr(explorer, "get_ipython", lambda: shell)
        first = widgets.split_explorer(PROFILE, LINK, measure=runs)
        first.points, first.link, first.mode = [1, 4], "1 GbE", "bytes"
        press(first, "run")
        again = widgets.split_explorer(PROFILE, LINK, measure=runs)
        assert (again.points, again.link, again.mode) == ([1, 4], "1 GbE", "bytes")
        assert again.runs == first.runs
        assert repr(again) == repr(first)
        other = widgets.split_explorer(PROFILE, LINK, split_points=(2,), measure=runs)
        assert (other.points, other.runs) == ([2], {})
        for picture in (first, again, other):
            picture.close()

    @pytest.mark.parametrize(
        ("start", "message"),
        [
            ({"split_points": (0,)}, "split point 0 leaves a stage without layers"),
            ({"split_points": (4, 2)}, "out of order"),
            ({"split_points": ()}, "shows 2 to 4 stages, got 1"),
            ({"split_points": (1, 2, 3, 4)}, "shows 2 to 4 stages, got 5"),
            ({"micro_batches": 3}, "one of 1, 2, 4, 8, 16 for a batch of 16, got 3"),
            ({"schedule": "zigzag"}, "unknown schedule 'zigzag': choose one of gpipe, 1f1b"),
            ({"frozen": 7}, "frozen of toy must be at most 6"),
        ],
    )
    def test_a_start_out_of_range_is_refused(self, start, message):
        with pytest.raises(ValueError, match=message):
            widgets.split_explorer(PROFILE, LINK, **start)
