"""The kernel's side of the picture; tests/project/test_browser.py tests the browser's."""

import json
import re

import pytest
from splits import LINK, PROFILE, measured

from labkit.costs.planner import best_split, predict_split
from labkit.units import format_bytes, format_seconds
from workbook import widgets
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
def explorer(runs):
    return widgets.split_explorer(PROFILE, LINK, split_points=(2,), measure=runs)


def choose(explorer, points, micro_batches=1, schedule="gpipe"):
    explorer.picture.points = points
    explorer.micro_batches.value, explorer.schedule.value = micro_batches, schedule


def press(explorer, button):
    """Press a button and wait until its work has ended."""
    button.click()
    explorer.job.join()


def number(explorer, row, name):
    """What stands in the table of numbers."""
    heads = re.findall(r'<th scope="col">([^<]*)<', explorer.numbers.value)
    rows = re.findall(r"<tr><th [^>]*>(\w+)</th>(.*?)</tr>", explorer.numbers.value)
    cells = {name: re.findall(r"<td[^>]*>([^<]*)<", cells) for name, cells in rows}
    return cells[row][heads.index(name) - 1]


def test_the_browser_gets_the_predicted_step(explorer):
    choose(explorer, [2, 4], 4, "1f1b")
    shown = explorer.picture.get_state()["shown"]
    split = predict_split(PROFILE, (2, 4), LINK, micro_batches=4, schedule="1f1b")
    for stage, row in enumerate(shown["stages"]):
        slots = [slot for slot in split.slots() if slot.rank == stage]
        assert row["predicted"]["spans"] == [(s.kind, s.start_s, s.end_s) for s in slots]
        assert row["predicted"]["memory"][1] == format_bytes(split.memory_bytes[stage])
    assert number(explorer, "predicted", "step") == format_seconds(split.step_s)
    assert number(explorer, "predicted", "idle") == f"{split.bubble:.0%}"
    step = f"the step takes {format_seconds(split.step_s)}"
    assert shown["caption"].startswith(f"cut before layers 2, 4. Predicted: {step}")
    assert explorer.link.options == ("this machine", *LINKS)
    json.dumps(shown)


def test_every_message_has_its_time(explorer):
    """What crosses a cut: an activation and a gradient per micro-batch."""
    choose(explorer, [2, 4], 4)
    first, second = (hop["spans"] for hop in explorer.picture.shown["hops"])
    kinds = [[kind for kind, *_ in spans] for spans in (first, second)]
    assert kinds == [["activation"] * 4 + ["gradient"] * 4] * 2
    slots = predict_split(PROFILE, (2, 4), LINK, micro_batches=4).slots()
    sent = [slot.end_s for slot in slots if slot[:2] in ((0, "forward"), (1, "backward"))]
    assert sorted(start for _, start, _ in first) == sorted(sent)
    assert all(end > start for spans in (first, second) for _, start, end in spans)


def test_run_measures_the_split_that_is_shown_and_its_numbers_stay(explorer, runs):
    choose(explorer, [2, 4], 4)
    press(explorer, explorer.run)
    assert runs.calls == [("toy", (2, 4), 16, {"micro_batches": 4, "schedule": "gpipe"})]
    split = predict_split(PROFILE, (2, 4), LINK, micro_batches=4)
    assert number(explorer, "measured", "step") == format_seconds(2 * split.step_s)
    assert number(explorer, "measured", "idle") == f"{split.bubble:.0%}"
    hops_s = 2 * sum(split.hop_s + split.backward_hop_s)
    assert number(explorer, "measured", "all hops") == format_seconds(hops_s)
    assert "measured, cut before layers 2, 4: 98.9 ms per step" in explorer.status.value
    explorer.picture.points = [4]
    assert "Measured" not in repr(explorer)
    explorer.picture.points, explorer.link.value = [2, 4], "1 GbE"
    assert "Measured" in repr(explorer)


def test_the_measured_step_is_laid_out_as_it_ran(explorer):
    press(explorer, explorer.run)
    slots = sorted(predict_split(PROFILE, (2,), LINK).slots(), key=lambda s: (s[0], s[3]))
    bars = [
        (stage, *bar)
        for stage, row in enumerate(explorer.picture.shown["stages"])
        for bar in row["measured"]["spans"]
    ]
    for (stage, kind, start_s, end_s), slot in zip(bars, slots, strict=True):
        assert (stage, kind) == slot[:2]
        assert (start_s, end_s) == pytest.approx((2 * slot.start_s, 2 * slot.end_s))


def test_the_buttons_wait_for_a_run_and_come_back_after_an_error(explorer, runs):
    seen = []

    def during():
        seen.append((explorer.run.disabled, explorer.best.disabled, explorer.status.value))
        raise TimeoutError("too slow")

    runs.during = during
    press(explorer, explorer.run)
    assert seen == [(True, True, '<span role="status">measuring ...</span>')]
    assert "TimeoutError: too slow" in explorer.status.value
    assert explorer.runs == {}
    runs.during = lambda: None
    press(explorer, explorer.run)
    assert ">measured" in explorer.status.value


def test_best_moves_the_cuts_there_and_says_why(explorer):
    choose(explorer, [1, 2], 4)
    before = predict_split(PROFILE, (1, 2), LINK, micro_batches=4)
    press(explorer, explorer.best)
    best = best_split(PROFILE, 3, LINK, micro_batches=4)
    assert tuple(explorer.picture.points) == best.split_points
    steps = f"step {1e3 * before.step_s:.3g} ms -&gt; {1e3 * best.step_s:.3g} ms"
    a, b = best.split_points
    assert f"best by the formula, cut before layers {a}, {b}: {steps}" in explorer.status.value


def test_another_number_of_stages_moves_the_cuts_as_far_as_needed(explorer):
    explorer.picture.points = [5]
    explorer.stages.value = 4
    assert explorer.picture.points == [3, 4, 5]
    explorer.stages.value = 2
    assert explorer.picture.points == [3]


def test_what_cannot_be_is_refused(explorer):
    for points, message in (
        ([4, 2], "split point 2 leaves a stage without layers"),
        ([6], "split point 6 leaves a stage without layers"),
        ([], "shows 2 to 4 stages, got 1"),
        ([1, 2, 3, 4], "shows 2 to 4 stages, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            explorer.picture.points = points
        with pytest.raises(ValueError, match=message):
            widgets.split_explorer(PROFILE, LINK, split_points=points)
    assert explorer.picture.points == [2]


def test_it_is_read_as_text_where_there_is_no_browser(explorer):
    text = repr(explorer)
    assert text.startswith("[picture and buttons] stages 2 to 4, a cut before any of 6 layers")
    assert text.endswith(explorer.picture.shown["caption"])
    data = explorer._repr_mimebundle_()
    assert data["text/plain"] == text
    assert "application/vnd.jupyter.widget-view+json" in data
