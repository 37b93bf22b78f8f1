"""The kernel's side of the picture; tests/project/test_browser.py tests the browser's."""

import json
import threading
from types import SimpleNamespace

import pytest
from splits import LINK, PROFILE, measured

from labkit.placement.planner import best_split, predict_split
from labkit.units import format_bytes, format_seconds
from workbook import plots, widgets
from workbook.widgets import explorer
from workbook.widgets.split_explorer import LINKS


class Runs:
    """Stands for ``measure_split``: measures twice what is predicted."""

    def __init__(self):
        self.calls, self.during = [], lambda: None

    def __call__(self, model, split_points, batch_size, **settings):
        self.calls.append((model, split_points, batch_size, settings))
        self.during()
        split = predict_split(PROFILE, split_points, LINK, **settings)
        return measured(split, factor=2.0, batch_size=batch_size)


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
        assert plots.split_costs(PROFILE, split).caption.endswith(
            shown["caption"].split(". ", 1)[1]
        )
        assert shown["layers"][0]["bytes"] == PROFILE.layers[0].output_bytes
        assert picture.options["link"] == ["this machine", *LINKS]
        json.dumps(shown)

    def test_every_message_has_its_time(self, picture):
        """What crosses a cut: an activation and a gradient per micro-batch."""
        picture.points, picture.micro_batches = [2, 4], 4
        first, second = (hop["spans"] for hop in picture.shown["hops"])
        kinds = [[kind for kind, *_ in spans] for spans in (first, second)]
        assert kinds == [["activation"] * 4 + ["gradient"] * 4] * 2
        slots = predict_split(PROFILE, (2, 4), LINK, micro_batches=4).slots()
        sent = [slot.end_s for slot in slots if slot[:2] in ((0, "forward"), (1, "backward"))]
        assert sorted(start for _, start, _ in first) == sorted(sent)
        assert all(end > start for spans in (first, second) for _, start, end in spans)

    def test_run_measures_the_split_that_is_shown(self, picture, runs):
        picture.points, picture.micro_batches = [2, 4], 4
        press(picture, "run")
        assert runs.calls == [("toy", (2, 4), 16, {"micro_batches": 4, "schedule": "gpipe"})]
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
        assert "Measured" not in repr(picture)
        picture.points, picture.link = [2], "1 GbE"
        assert "Measured" in repr(picture)

    def test_stop_ends_a_run_and_a_second_press_does_nothing(self, picture, runs):
        measuring, seen = threading.Event(), []

        def during():
            seen.append((picture.busy, picture.status))
            measuring.set()
            while True:
                threading.Event().wait(0.01)

        runs.during = during
        picture.run()
        measuring.wait()
        picture.run()
        press(picture, "stop")
        assert seen == [("measuring ...", "")]
        assert (picture.status, picture.busy, picture.runs) == ("stopped", "", {})
        runs.during = lambda: None
        press(picture, "run")
        assert picture.status.startswith("measured")

    def test_best_moves_the_cuts_there_and_says_why(self, picture):
        picture.points, picture.micro_batches = [1, 2], 4
        before = predict_split(PROFILE, (1, 2), LINK, micro_batches=4)
        press(picture, "best")
        best = best_split(PROFILE, 3, LINK, micro_batches=4)
        assert tuple(picture.points) == best.split_points
        steps = f"step {1e3 * before.step_s:.3g} ms -> {1e3 * best.step_s:.3g} ms"
        a, b = best.split_points
        assert picture.status == f"best by the model, cut before layers {a}, {b}: {steps}"

    def test_what_cannot_be_is_refused(self, picture):
        for points, message in (
            ([4, 2], "split point 2 leaves a stage without layers"),
            ([6], "split point 6 leaves a stage without layers"),
            ([], "shows 2 to 4 stages, got 1"),
            ([1, 2, 3, 4], "shows 2 to 4 stages, got 5"),
        ):
            with pytest.raises(ValueError, match=message):
                picture.points = points
            with pytest.raises(ValueError, match=message):
                widgets.split_explorer(PROFILE, LINK, split_points=points)
        assert picture.points == [2]

    def test_it_is_read_as_text_where_there_is_no_browser(self, picture):
        text = repr(picture)
        assert text.startswith("[picture and buttons] stages 2 to 4, a cut before any of 6 layers")
        assert text.endswith(picture.shown["caption"])
        data, _ = picture._repr_mimebundle_()
        assert data["text/plain"] == text
        assert "application/vnd.jupyter.widget-view+json" in data

    def test_it_keeps_its_state_when_its_cell_is_run_again(self, runs, monkeypatch):
        shell = SimpleNamespace(get_parent=lambda: {"metadata": {"cellId": "the cell"}})
        monkeypatch.setattr(explorer, "get_ipython", lambda: shell)
        first = widgets.split_explorer(PROFILE, LINK, split_points=(3,), measure=runs)
        first.points, first.link, first.mode = [1, 4], "1 GbE", "bytes"
        press(first, "run")
        again = widgets.split_explorer(PROFILE, LINK, split_points=(3,), measure=runs)
        assert (again.points, again.link, again.mode) == ([1, 4], "1 GbE", "bytes")
        assert repr(again) == repr(first)
        other = widgets.split_explorer(PROFILE, LINK, split_points=(2,), measure=runs)
        assert (other.points, other.runs) == ([2], {})
        for picture in (first, again, other):
            picture.close()
