"""A model cut into stages: layers in a row, cuts that are dragged, and one step below."""

import html
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import anywidget
import traitlets
from ipywidgets import HTML, Button, Dropdown, HBox, IntSlider, SelectionSlider
from traitlets import Dict, Int, List, Unicode

from labkit.costs.link import Link
from labkit.costs.planner import Profile, SplitModel, best_split, predict_split
from labkit.schedules.pipeline import PIPELINES
from labkit.schedules.split_points import check_split_points
from labkit.training.measured import MeasuredSplit, measure_split
from labkit.units import format_seconds, html_table
from workbook.plots.models import LINKS as NETWORKS
from workbook.widgets.explorer import Job, Printed
from workbook.widgets.split_step import (
    cuts_words,
    layer_data,
    split_caption,
    step_data,
    step_numbers,
    ticks,
)

HERE = "this machine"
# Bytes per second are those of the standards, in one direction: 450e9 is half of what an H100's
# NVLink carries in both directions together (NVIDIA, "H100 Tensor Core GPU Architecture", 2022),
# 31.5e9 are 16 lanes of 16 GT/s with 128b/130b encoding (PCI Express 4.0). The time to start a
# message is only an order of magnitude.
LINKS = {
    "NVLink 4": Link(5e-6, 1 / 450e9),
    "PCIe 4 x16": Link(10e-6, 1 / 31.5e9),
    "10 GbE": NETWORKS["10 Gb/s network"],
    "1 GbE": NETWORKS["1 Gb/s network"],
}
MAX_STAGES = 4
MICRO_BATCHES = (1, 2, 4, 8, 16)
_FOLDER = Path(__file__).parent


class CutPicture(anywidget.AnyWidget):
    """Layers in a row, cuts that are dragged, and the step that the formula predicts.

    Attributes:
        points: the split points, 1 to 3; the browser moves them.
        mode: layers are as wide as their compute (``compute``) or as tall as their ``bytes``.
        shown: the step, from Python.
    """

    _esm = _FOLDER / "split_explorer.js"
    _css = _FOLDER / "split_explorer.css"
    points = List(Int()).tag(sync=True)
    mode = Unicode("compute").tag(sync=True)
    shown = Dict().tag(sync=True)

    def __init__(self, num_layers: int, **traits: Any):
        self._num_layers = num_layers
        super().__init__(**traits)

    @traitlets.validate("points")
    def _check_points(self, proposal: dict) -> list[int]:
        points = proposal["value"]
        if not 1 <= len(points) < MAX_STAGES:
            raise ValueError(f"it shows 2 to {MAX_STAGES} stages, got {len(points) + 1}")
        return list(check_split_points(points, self._num_layers))


class SplitExplorer(Printed):
    """Explore where to cut a model: drag the cuts, see the predicted step, and measure it.

    Attributes:
        picture, stages, link, micro_batches, schedule, mode: what can be chosen.
        best, run, status: the buttons, and what one of them is doing or has done.
        runs: by points, micro-batches and schedule, what was measured on this machine.
    """

    def __init__(
        self,
        profile: Profile,
        link: Link,
        *,
        split_points: Sequence[int],
        measure: Callable[..., MeasuredSplit] = measure_split,
    ):
        """Show a model's layers with ``link`` between two stages; ``LINKS`` can be chosen as well.

        Args:
            split_points: to start with, 1 to 3.
            measure: what Run calls, with the arguments of ``training.measured.measure_split``.
        """
        self._profile = profile
        self._links = {HERE: link} | LINKS
        self._measure = measure
        self.runs: dict[tuple, MeasuredSplit] = {}
        self.job = Job(self._say)
        self._axis_settings: tuple = ()
        self._axis_end_s = 0.0
        layers = len(profile.layers)
        self.picture = CutPicture(layers, points=list(split_points))
        most = min(MAX_STAGES, layers)
        self.stages = IntSlider(len(self.picture.points) + 1, 2, most, description="stages")
        counts = [count for count in MICRO_BATCHES if count <= profile.batch_size]
        self.link = Dropdown(options=list(self._links), description="link")
        self.micro_batches = SelectionSlider(options=counts, description="micro-batches")
        self.micro_batches.style.description_width = "initial"
        # Its bars are of one stage per rank, and of whole backwards.
        drawn = [name for name, p in PIPELINES.items() if not (p.interleaves or p.cuts_backward)]
        self.schedule = Dropdown(options=drawn, description="schedule")
        self.mode = Dropdown(options=["compute", "bytes"], description="layers by")
        settings = [self.link, self.micro_batches, self.schedule, self.mode]
        for control in settings:
            control.observe(self._draw, "value")
        self.stages.observe(self._resize, "value")
        self.picture.observe(self._draw, "points")
        self.best = Button(description="Best split")
        self.best.on_click(lambda _: self.job.start("searching ...", self._move_to_best))
        self.run = Button(description="Run")
        self.run.on_click(self._start_run)
        self.status = HTML()
        self.numbers = HTML()
        self.numbers.add_class("jp-RenderedHTMLCommon")
        wrap = {"flex_flow": "row wrap"}
        choices = HBox([self.stages, *settings], layout=wrap)
        buttons = HBox([self.best, self.run, self.status], layout=wrap)
        super().__init__([choices, buttons, self.numbers, self.picture])
        self._say("", "")
        self._draw()

    def predicted(self) -> SplitModel:
        return predict_split(self._profile, self.picture.points, **self._step_settings())

    def __repr__(self) -> str:
        """The controls and the numbers, for pages without a kernel."""
        shown = self.picture.shown
        return (
            f"[picture and buttons] stages 2 to {self.stages.max}, a cut before any of "
            f"{len(self._profile.layers)} layers, link ({', '.join(self._links)}), micro-batches, "
            f"schedule; Best split, Run. {shown['title']}. {shown['caption']}"
        )

    def _split(self) -> tuple[tuple[int, ...], int, str]:
        return tuple(self.picture.points), self.micro_batches.value, self.schedule.value

    def _step_settings(self) -> dict[str, Any]:
        _, count, schedule = self._split()
        link = self._links[self.link.value]
        return {"link": link, "micro_batches": count, "schedule": schedule}

    def _resize(self, change: dict) -> None:
        """Keep the cuts, moved if necessary, and add new ones on the right."""
        count = change["new"] - 1
        layers = len(self._profile.layers)
        points = [min(p, layers - count + i) for i, p in enumerate(self.picture.points[:count])]
        while len(points) < count:
            points.append((points[-1] + layers) // 2)
        self.picture.points = points

    def _draw(self, _change: Any = None) -> None:
        # What was measured does not depend on the link of the prediction.
        run = self.runs.get(self._split())
        profile = self._profile
        split = self.predicted()
        points, count, schedule = self._split()
        self.stages.value = len(points) + 1
        self.picture.mode = self.mode.value
        uncut_bytes = predict_split(profile, (), Link(0, 0)).memory_bytes[0]
        step = step_data(split, len(profile.layers), uncut_bytes, run)
        # While only cuts move, the axis grows and never shrinks.
        settings = (len(points), *self._step_settings().values())
        if settings != self._axis_settings or step["last_s"] > self._axis_end_s:
            self._axis_end_s = 1.1 * step["last_s"]
        self._axis_settings = settings
        self.numbers.value = html_table(*step_numbers(split, run))
        self.picture.shown = step | {
            "points": list(points),
            "layers": layer_data(profile),
            "title": f"{profile.model} in {len(points) + 1} stages over {self.link.value}, "
            f"batch of {profile.batch_size} in {count} ({schedule})",
            "caption": f"{cuts_words(points)}. {split_caption(split, run)}",
            "end_s": self._axis_end_s,
            "ticks": ticks(self._axis_end_s),
        }

    def _start_run(self, _button: Button) -> None:
        # With the split as it is now: it can be changed during the run.
        self.job.start("measuring ...", partial(self._run, *self._split(), self.link.value))

    def _say(self, doing: str, message: str) -> None:
        self.best.disabled = self.run.disabled = bool(doing)
        self.status.value = f'<span role="status">{html.escape(doing or message)}</span>'

    def _run(self, points: tuple[int, ...], count: int, schedule: str, link: str) -> str:
        counts = {"batch_size": self._profile.batch_size, "micro_batches": count}
        run = self._measure(self._profile.model, points, schedule=schedule, **counts)
        self.runs[points, count, schedule] = run
        self._draw()
        words = f"measured, {cuts_words(points)}: {format_seconds(median(run.step_s))} per step"
        return words if link == HERE else f"{words}, on {HERE}, not over {link}"

    def _move_to_best(self) -> str:
        before = self.predicted()
        best = best_split(self._profile, self.stages.value, **self._step_settings())
        self.picture.points = list(best.split_points)
        steps = f"step {format_seconds(before.step_s)} -> {format_seconds(best.step_s)}"
        return f"best by the formula, {cuts_words(best.split_points)}: {steps}"
