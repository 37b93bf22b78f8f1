"""Sliders above a figure: what is shown is its static twin's alt text and caption."""

import html
import math
import re
import threading

import pytest
from splits import LINK, PROFILE, measured

from labkit.costs.planner import predict_split
from workbook import plots, widgets
from workbook.widgets.explorer import Job

MAKE = {
    "buckets": widgets.bucket_explorer,
    "ring": widgets.ring_stepper,
    "staleness": widgets.staleness_explorer,
    "memory": widgets.memory_explorer,
}


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """tests/plots look at the pictures."""
    monkeypatch.setattr(plots.CaptionedFigure, "png", lambda figure: b"a picture")


def alt_of(explorer):
    (alt,) = re.findall(r'<img alt="([^"]+)"', explorer.view.value)
    return html.unescape(alt)


def shows(explorer, twin):
    assert alt_of(explorer) == twin.alt
    assert html.escape(twin.caption) in explorer.view.value


def test_every_control_of_the_buckets_shows_its_static_twin():
    made = widgets.bucket_explorer()
    shows(made, plots.bucket_overlap(25, 4, "10 Gb/s network"))
    made.size.value = 4
    made.ranks.value = 99
    made.link.value = "1 Gb/s network"
    shows(made, plots.bucket_overlap(4, 16, "1 Gb/s network"))


def test_every_step_of_the_ring_shows_its_static_twin():
    made = widgets.ring_stepper(4)
    for step in range(7):
        made.step.value = step
        shows(made, plots.ring_step(step, 4))
    made.ranks.value = 2
    assert (made.step.value, made.step.max) == (2, 2), "the steps follow the ranks"
    shows(made, plots.ring_step(2, 2))


def test_the_bound_follows_the_workers_and_nothing_between_is_drawn():
    made, drawn = widgets.staleness_explorer(), []
    draw = made.draw
    made.draw = lambda *chosen: drawn.append(chosen) or draw(*chosen)
    made.bound.value = 2
    shows(made, plots.staleness_model(3, 4, 2))
    made.workers.value = 5
    made.workers.value = 2
    made.bound.value = math.inf
    made.workers.value = 6
    assert drawn == [(3, 4, 2), (5, 4, 4), (2, 4, 4), (2, 4, math.inf), (6, 4, math.inf)]
    shows(made, plots.staleness_model(6, 4))


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_it_is_read_as_text_and_a_new_caption_is_read_aloud(make):
    made = make()
    text = repr(made)
    assert text.startswith("[sliders] ")
    assert text.endswith(made.draw(*made.chosen()).caption)
    bundle = made._repr_mimebundle_()
    assert bundle["text/plain"] == text
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert '<figcaption role="status" aria-live="polite"' in made.view.value


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_what_the_memory_explorer_runs_holds_what_it_predicts(model):
    made = widgets.memory_explorer(model, ranks=2, stage=1)
    made.stage.value, made.precision.value = 3, "float64"
    assert "between two steps (" in made.caption
    run, shown = made.children[-2:]
    run.click()
    made.job.join()
    assert "is equal to what was predicted" in shown.value


def test_a_pipelines_step_is_predicted_and_then_run():
    """By the schedule that is chosen; a new choice is a new prediction."""
    ran = []

    def measure(micro_batches, schedule):
        ran.append((micro_batches, schedule))
        split = predict_split(PROFILE, (2,), LINK, micro_batches=micro_batches, schedule=schedule)
        return measured(split)

    made = widgets.pipeline_explorer(2, lambda count: 0.008 / count, measure)
    assert "the step takes 30 ms" in made.caption
    made.count.value, made.schedule.value = 8, "1f1b"
    assert "the step takes 27 ms" in made.caption
    run, shown = made.children[-2:]
    run.click()
    made.job.join()
    assert ran == [(8, "1f1b")]
    assert "Measured: the step takes" in shown.value


def test_a_job_is_over_when_its_result_is_shown():
    """A handler that shows the result slowly is waited for."""
    is_ending, shown = threading.Event(), []

    def say(doing, said):
        if not doing:
            is_ending.set()
            threading.Event().wait(0.1)
        shown.append(said)

    job = Job(say)
    job.start("counting ...", lambda: "three")
    assert is_ending.wait(10)
    job.join()
    assert shown == ["", "three"]
