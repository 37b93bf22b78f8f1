"""The kernel's side of the picture; tests/project/test_browser_explorer.py tests the browser's."""

import importlib.util
import threading

import pytest
from splits import LINK, PROFILE, measured
from torch import nn

from labkit.errors import WorkerError
from labkit.placement.planner import best_split, predict_split
from workbook import plots, widgets
from workbook.widgets import kept
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
    picture._handle_custom_msg({"kind": kind}, [])
    picture.join()


class TestSplitPicture:
    def test_the_browser_gets_all_that_it_computes_with(self, picture):
        state = picture.get_state()
        assert state["points"] == [2]
        assert state["profile"]["layers"][0]["output_bytes"] == PROFILE.layers[0].output_bytes
        assert state["links"]["this machine"]["alpha_s"] == LINK.alpha_s
        assert [*state["links"]] == ["this machine", *LINKS]
        options = state["options"]
        assert (options["stages"], options["batch_size"]) == ([2, 3, 4], [4, 8, 16, 32, 64])
        assert options["cap_bytes"][-1] == ("no limit", None)

    def test_it_is_one_module_that_imports_nothing(self, picture):
        assert "import " not in picture._esm.replace("imports", "")
        assert picture._esm.count("export default") == 1
        assert "://" not in picture._esm.replace("http://www.w3.org/2000/svg", "")
        assert "://" not in picture._css

    def test_run_measures_the_split_that_is_shown(self, picture, runs):
        picture.points, picture.micro_batches = [2, 4], 4
        press(picture, "run")
        options = {"batch_size": 16, "micro_batches": 4, "schedule": "gpipe"}
        options |= {"input_shape": (3, 32, 32), "frozen": 0}
        assert runs.calls == [("toy", (2, 4), options)]
        (run,) = picture.measured
        split = predict_split(PROFILE, (2, 4), LINK, micro_batches=4)
        assert (run["points"], run["micro_batches"]) == ([2, 4], 4)
        assert run["step_s"] == pytest.approx(2 * split.step_s)
        assert run["bubble"] == pytest.approx(split.bubble)
        assert run["hops_s"] == pytest.approx(2 * sum(split.hop_s + split.backward_hop_s))
        assert picture.status == "measured, cut before layers 2, 4: 98.9 ms per step"

    def test_the_measured_step_is_laid_out_as_it_ran(self, picture):
        press(picture, "run")
        (run,) = picture.measured
        slots = predict_split(PROFILE, (2,), LINK).slots()
        spans = sorted(run["spans"], key=lambda span: (span["stage"], span["start_s"]))
        assert [(span["stage"], span["kind"]) for span in spans] == [s[:2] for s in slots]
        for span, slot in zip(spans, slots, strict=True):
            assert span["start_s"] == pytest.approx(2 * slot.start_s)
            assert span["end_s"] == pytest.approx(2 * slot.end_s)

    def test_what_was_measured_stays(self, picture):
        press(picture, "run")
        picture.points = [4]
        press(picture, "run")
        assert [run["points"] for run in picture.measured] == [[2], [4]]
        picture.points = [2]
        assert "Measured" in repr(picture)
        picture.points = [3]
        assert "Measured" not in repr(picture)

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
        assert (picture.status, picture.busy, picture.measured) == ("stopped", "", [])
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
        assert picture.status.startswith(f"best by the model: cut before layers {a}, {b}. The ste")
        assert f"from {1e3 * before.step_s:.3g} ms to {1e3 * best.step_s:.3g} ms" in picture.status
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
        names = [layer["name"] for layer in picture.profile["layers"]]
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
        monkeypatch.setattr(kept, "_cell", lambda: "a cell")
        monkeypatch.setattr(kept, "_STATES", {})
        first = widgets.split_explorer(PROFILE, LINK, measure=runs)
        first.points, first.link, first.mode = [1, 4], "1 GbE", "bytes"
        press(first, "run")
        again = widgets.split_explorer(PROFILE, LINK, measure=runs)
        assert (again.points, again.link, again.mode) == ([1, 4], "1 GbE", "bytes")
        assert again.measured == first.measured
        assert repr(again) == repr(first)
        other = widgets.split_explorer(PROFILE, LINK, split_points=(2,), measure=runs)
        assert (other.points, other.measured) == ([2], [])
        for picture in (first, again, other):
            picture.close()

    def test_without_anywidget_there_are_sliders(self, monkeypatch, runs):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "anywidget" else found(name)
        )
        sliders = widgets.split_explorer(PROFILE, LINK, measure=runs)
        assert sliders.cuts.points == (3,)
        sliders.close()
