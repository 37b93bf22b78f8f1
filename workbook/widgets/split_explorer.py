"""A model cut into stages: layers in a row, cuts that are dragged, and one step below."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import anywidget
import traitlets
from traitlets import Dict, Int, List, Unicode

from labkit.costs.link import Link
from labkit.placement.planner import Profile, SplitModel, best_split, predict_split
from labkit.schedules.pipeline import PIPELINES
from labkit.schedules.split_points import check_split_points
from labkit.training.measured import MeasuredSplit, measure_split
from labkit.units import format_seconds
from workbook.plots.models import LINKS as NETWORKS
from workbook.plots.split_costs import cuts_words, split_caption
from workbook.widgets.explorer import cell_state
from workbook.widgets.job import Job
from workbook.widgets.split_step import layer_data, step_data, ticks

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
_SETTINGS = ("points", "link", "micro_batches", "schedule")
_HERE = Path(__file__).parent


def split_explorer(
    profile: Profile,
    link: Link,
    *,
    split_points: Sequence[int],
    micro_batches: int = 1,
    schedule: str = "gpipe",
    measure: Callable[..., MeasuredSplit] = measure_split,
) -> "SplitPicture":
    """Explore where to cut a model: drag the cuts, see the predicted step, and measure it.

    Its static twin is ``plots.split_costs``.

    Args:
        profile: the model's layers.
        link: between two stages on this machine; ``LINKS`` can be chosen as well.
        split_points: to start with, 1 to 3.
        micro_batches: to start with, one of ``MICRO_BATCHES``, at most the batch size.
        schedule: to start with, ``gpipe`` or ``1f1b``.
        measure: what Run calls, with the arguments of ``training.measured.measure_split``.

    Raises:
        ValueError: a split that is not possible.
    """
    start = {"points": list(split_points), "micro_batches": micro_batches, "schedule": schedule}
    # Of another model, what was measured of this one must not be shown.
    state = cell_state(profile.model, profile.batch_size, len(profile.layers), str(start))
    return SplitPicture(profile, {HERE: link} | LINKS, measure, start, state)


class SplitPicture(anywidget.AnyWidget):
    """Layers in a row, cuts that are dragged, and the step that the model predicts.

    The browser moves the cuts and sends each setting that the learner changes; what it draws of a
    step comes from here, as ``shown``.

    Attributes:
        points: the split points, 1 to 3.
        link, micro_batches, schedule: the settings of the step.
        mode: layers are as wide as their compute (``compute``) or as tall as their ``bytes``.
        busy: what a button is doing; empty if nothing.
        status: what a button has done.
        pressed: the button that was pressed last in the browser, and the how many-th press it was.
        runs: by points, micro-batches and schedule, what was measured on this machine.
    """

    _esm = _HERE / "split_explorer.js"
    _css = _HERE / "split_explorer.css"

    options = Dict().tag(sync=True)
    points = List(Int()).tag(sync=True)
    link = Unicode(HERE).tag(sync=True)
    micro_batches = Int().tag(sync=True)
    schedule = Unicode().tag(sync=True)
    mode = Unicode("compute").tag(sync=True)
    busy = Unicode().tag(sync=True)
    status = Unicode().tag(sync=True)
    shown = Dict().tag(sync=True)
    pressed = List().tag(sync=True)

    def __init__(
        self,
        profile: Profile,
        links: dict[str, Link],
        measure: Callable[..., MeasuredSplit],
        start: dict[str, Any],
        state: dict[str, Any],
    ):
        self._profile, self._links, self._measure, self._state = profile, links, measure, state
        self.runs: dict[tuple, MeasuredSplit] = state.setdefault("runs", {})
        self._job = Job(self._say)
        self._axis: tuple[tuple, float] = (), 0.0
        options = {
            "stages": list(range(2, min(MAX_STAGES, len(profile.layers)) + 1)),
            "link": list(links),
            "micro_batches": [count for count in MICRO_BATCHES if count <= profile.batch_size],
            "schedule": list(PIPELINES),
        }
        super().__init__(options=options, **(start | state.get("settings", {})))
        self.observe(self._act, "pressed")
        self.observe(self._draw, _SETTINGS)
        self.observe(self._keep, [*_SETTINGS, "mode"])
        self._draw()

    def predicted(self) -> SplitModel:
        return predict_split(self._profile, self.points, **self._step_settings())

    def measured(self) -> MeasuredSplit | None:
        """What was measured of this split; on which link it was predicted does not matter."""
        return self.runs.get((tuple(self.points), self.micro_batches, self.schedule))

    def run(self) -> None:
        """Measure the split, as the button does: in the background."""
        split = tuple(self.points), self.micro_batches, self.schedule
        self._job.start("measuring ...", partial(self._run, *split, self.link))

    def best(self) -> None:
        """Move the cuts to the best ones, as the button does: in the background."""
        self._job.start("searching ...", self._move_to_best)

    def join(self) -> None:
        """Wait until a button's work has ended."""
        self._job.join()

    def __repr__(self) -> str:
        """The controls and the numbers, for pages without a kernel."""
        return (
            f"[picture and buttons] stages 2 to {self.options['stages'][-1]}, a cut before any of "
            f"{len(self._profile.layers)} layers, link ({', '.join(self._links)}), micro-batches, "
            f"schedule; Best split, Run. {self.shown['title']}. {self.shown['caption']}"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        # The base class shortens the text, and a stored notebook keeps nothing else of a widget.
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/plain": repr(self)}, metadata

    def _step_settings(self) -> dict[str, Any]:
        counts = {"micro_batches": self.micro_batches, "schedule": self.schedule}
        return {"link": self._links[self.link], **counts}

    def _draw(self, _change: Any = None) -> None:
        profile, split, run = self._profile, self.predicted(), self.measured()
        whole = predict_split(profile, (), Link(0, 0)).memory_bytes[0]
        step = step_data(split, len(profile.layers), whole, run)
        # While only cuts move, the axis grows and never shrinks.
        settings, end_s = (len(self.points), *self._step_settings().values()), self._axis[1]
        if settings != self._axis[0] or step["last_s"] > end_s:
            end_s = 1.1 * step["last_s"]
        self._axis = settings, end_s
        self.shown = step | {
            "points": list(self.points),
            "layers": layer_data(profile),
            "title": f"{profile.model} in {len(self.points) + 1} stages over {self.link}, "
            f"batch of {profile.batch_size} in {self.micro_batches} ({self.schedule})",
            "caption": f"{cuts_words(self.points)}. {split_caption(split, run)}",
            "end_s": end_s,
            "ticks": ticks(end_s),
        }

    def _keep(self, _change: Any) -> None:
        self._state["settings"] = {name: getattr(self, name) for name in (*_SETTINGS, "mode")}

    def _act(self, change: dict) -> None:
        {"run": self.run, "best": self.best, "stop": self._job.stop}[change["new"][0]]()

    def _say(self, doing: str, said: str) -> None:
        self.busy, self.status = doing, said

    def _run(self, points: tuple[int, ...], count: int, schedule: str, link: str) -> str:
        counts = {"batch_size": self._profile.batch_size, "micro_batches": count}
        run = self._measure(self._profile.model, points, schedule=schedule, **counts)
        self.runs[points, count, schedule] = run
        self._draw()
        where = "" if link == HERE else f", on {HERE}, not over {link}"
        return (
            f"measured, {cuts_words(points)}: {format_seconds(median(run.step_s))} per step{where}"
        )

    def _move_to_best(self) -> str:
        before = self.predicted()
        best = best_split(self._profile, len(self.points) + 1, **self._step_settings())
        self.points = list(best.split_points)
        steps = f"step {format_seconds(before.step_s)} -> {format_seconds(best.step_s)}"
        return f"best by the model, {cuts_words(best.split_points)}: {steps}"

    @traitlets.validate("points")
    def _check_points(self, proposal: dict) -> list[int]:
        points = proposal["value"]
        if not 1 <= len(points) < MAX_STAGES:
            raise ValueError(f"it shows 2 to {MAX_STAGES} stages, got {len(points) + 1}")
        return list(check_split_points(points, len(self._profile.layers)))
