"""A model cut into stages, with sliders for the cuts, the link and the micro-batches."""

import html
import math
import statistics
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ipywidgets

from labkit import plots
from labkit.costs.link import Link
from labkit.placement.stage_costs import Profile
from labkit.plots.split_costs import cuts_words
from labkit.schedules.pipeline import PIPELINES
from labkit.training.split_run import MeasuredSplit, measure_split
from labkit.units import format_bytes, format_seconds
from labkit.widgets.cut_sliders import WIDE, CutSliders
from labkit.widgets.explorer import Explorer
from labkit.widgets.split_choice import HERE, Choice, SplitModels

MAX_STAGES = 4
MICRO_BATCHES = (1, 2, 4, 8, 16)
_OBJECTIVES = {"shortest step": "step", "most even compute": "largest_stage"}


def split_explorer(
    profile: Profile,
    link: Link | None = None,
    *,
    split_points: Sequence[int] | None = None,
    micro_batches: int = 1,
    schedule: str = "gpipe",
    input_shape: tuple[int, ...] = (3, 32, 32),
    frozen: int = 0,
    measure: Callable[..., MeasuredSplit] = measure_split,
) -> "SplitExplorer":
    """Explore where to cut a model: sliders show the predicted costs, a button measures them.

    ``plots.split_costs`` draws the same figure without controls.

    Args:
        profile: the model's layers, and the batch size to start with.
        link: between two stages on this machine (``training.split_run.stage_link``); None leaves
            only ``split_choice.LINKS``.
        split_points: to start with, 1 to 3; by default one cut in the middle of the layers.
        micro_batches: to start with, one of ``MICRO_BATCHES``, at most the batch size.
        schedule: to start with, ``gpipe`` or ``1f1b``.
        input_shape: of one sample, for the run.
        frozen: the number of layers, from the first on, that are not trained.
        measure: the function that the button calls, with the arguments of
            ``training.split_run.measure_split``.

    Raises:
        ValueError: a start that its control does not offer, or a model that cannot be cut.
    """
    points = (len(profile.layers) // 2,) if split_points is None else tuple(split_points)
    if not 1 <= len(points) < MAX_STAGES:
        raise ValueError(f"the explorer shows 2 to {MAX_STAGES} stages, got {len(points) + 1}")
    possible = [m for m in MICRO_BATCHES if m <= profile.batch_size]
    if micro_batches not in possible:
        known = ", ".join(map(str, possible))
        raise ValueError(
            f"micro_batches is one of {known} for a batch of {profile.batch_size}, "
            f"got {micro_batches!r}"
        )
    models = SplitModels(profile, link, frozen)
    start = Choice(points, next(iter(models.links)), micro_batches, schedule, profile.batch_size)
    models.predicted(start)  # refuses impossible settings
    run = partial(measure, profile.model, input_shape=tuple(input_shape), frozen=frozen)
    return SplitExplorer(models, start, run)


class SplitExplorer(Explorer):
    """Controls and two buttons above a figure.

    Attributes:
        stages: the slider of the number of stages, 2 to 4.
        cuts: the sliders of the split points; one that is moved pushes the others.
        link, batch, micro_batches, schedule: the other controls of the figure. Every micro-batch
            needs a sample, so ``batch`` and ``micro_batches`` may move each other.
        best: the button that moves the cuts to the best ones, by ``objective``, with at most
            ``cap`` bytes per stage.
        run: the button that measures the split. The figure shows measured bars whenever the
            controls have the values of a measured run. An error of the run is shown, not raised.
        status: what a button is doing, or has done.
    """

    def __init__(self, models: SplitModels, start: Choice, measure: Callable[..., MeasuredSplit]):
        self._models, self._measure = models, measure
        self._measured: dict[Choice, MeasuredSplit] = {}
        self._working = threading.Lock()
        self._make_controls(start)
        # Observed before the Explorer's own handler: the other controls move before the drawing.
        self.stages.observe(self._resize, "value")
        self.micro_batches.observe(self._fit_batch, "value")
        self.batch.observe(self._fit_micro_batches, "value")
        for slider in self.cuts.sliders:
            slider.observe(self._push, "value")
        self.best = ipywidgets.Button(description="Best split")
        self.run = ipywidgets.Button(description="Run")
        self.best.on_click(self._find_best)
        self.run.on_click(self._run)
        self.status = ipywidgets.HTML()
        rows = [
            ipywidgets.HBox([self.stages, self.link]),
            *self.cuts.rows,
            ipywidgets.HBox([self.batch, self.micro_batches, self.schedule]),
            ipywidgets.HBox([self.objective, self.cap, self.best]),
            ipywidgets.HBox([self.run, self.status]),
        ]
        controls = (self.stages, self.link, self.batch, self.micro_batches, self.schedule)
        super().__init__(self._draw_split, *self.cuts.sliders, *controls, rows=rows)

    def _make_controls(self, start: Choice) -> None:
        names = [layer.name for layer in self._models.measured.layers]
        most = min(MAX_STAGES, len(names))
        self.stages = ipywidgets.IntSlider(
            len(start.points) + 1, 2, most, description="stages", style=WIDE
        )
        self.cuts = CutSliders(names, most - 1)
        self.cuts.move(start.points)
        size = start.batch_size
        batches = sorted({size // 4, size // 2, size, 2 * size, 4 * size} - {0})
        counts = [count for count in MICRO_BATCHES if count <= batches[-1]]
        self.batch = _slider("batch", batches, size)
        self.micro_batches = _slider("micro-batches", counts, start.micro_batches)
        self.schedule = _menu("schedule", list(PIPELINES), start.schedule)
        self.link = _menu("link", list(self._models.links), start.link)
        self.objective = _menu("best has", _OBJECTIVES, "step")
        whole = self._models.whole_bytes(start._replace(batch_size=batches[-1]))
        caps = [2**power for power in range(max(0, whole.bit_length() - 6), whole.bit_length())]
        limits = [*((format_bytes(cap), cap) for cap in caps), ("no limit", math.inf)]
        self.cap = _slider("a stage holds", limits, math.inf)

    def chosen(self) -> Choice:
        counts = self.micro_batches.value, self.schedule.value, self.batch.value
        return Choice(self.cuts.points, self.link.value, *counts)

    def _draw_split(self, *chosen: Any) -> plots.CaptionedFigure:
        choice = Choice(*chosen)
        measured = self._measured.get(choice._replace(link=HERE))
        figure = plots.split_costs(
            self._models.profile(choice),
            self._models.predicted(choice),
            measured,
            title=self._models.title(choice),
            axis_range=self._models.axis_range(choice),
        )
        if measured and choice.link != HERE:
            figure.caption += f" It was measured on {HERE}, not over {choice.link}."
        return figure

    def __repr__(self) -> str:
        choice = self.chosen()
        return (
            f"[sliders and buttons] stages 2 to {self.stages.max}, a cut before any of "
            f"{len(self._models.measured.layers)} layers, link "
            f"({', '.join(self._models.links)}), batch, micro-batches, schedule; Best split, Run. "
            f"{self._models.title(choice)}, {cuts_words(choice.points)}. {self.caption}"
        )

    def close(self) -> None:
        self.best.on_click(self._find_best, remove=True)
        self.run.on_click(self._run, remove=True)
        super().close()

    def _run(self, _button: Any) -> None:
        self._work("measuring ...", self._measure_chosen)

    def _find_best(self, _button: Any) -> None:
        self._work("searching ...", self._move_to_best)

    def _work(self, doing: str, job: Callable[[], str]) -> None:
        """Do a button's job and show its outcome; pressing a button meanwhile does nothing."""
        if not self._working.acquire(blocking=False):
            return
        self._say(doing)
        self.best.disabled = self.run.disabled = True
        said = "stopped"
        try:
            said = job()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            self._say(said)
            self.best.disabled = self.run.disabled = False
            self._working.release()

    def _say(self, words: str) -> None:
        # A worker's traceback has many lines.
        style = "white-space: pre-wrap; max-height: 15em; overflow: auto; line-height: 1.4"
        self.status.value = f'<div role="status" style="{style}">{html.escape(words)}</div>'

    def _measure_chosen(self) -> str:
        choice = self.chosen()
        measured = self._measure(
            choice.points,
            batch_size=choice.batch_size,
            micro_batches=choice.micro_batches,
            schedule=choice.schedule,
        )
        self._measured[choice._replace(link=HERE)] = measured
        with self._showing:
            self._pages.clear()
            self._show()
        step = format_seconds(statistics.median(measured.step_s))
        return f"measured, {cuts_words(choice.points)}: {step} per step"

    def _move_to_best(self) -> str:
        best = self._models.best(self.chosen(), self.objective.value, self.cap.value)
        with self.moving():
            self.cuts.move(best.split_points)
        self._show()
        return f"best by the model: {cuts_words(best.split_points)}"

    def _resize(self, _change: Any) -> None:
        with self.moving():
            self.cuts.resize(self.stages.value - 1)

    def _push(self, change: Any) -> None:
        if not self._is_moving:
            with self.moving():
                self.cuts.push(change.owner)

    def _fit_batch(self, _change: Any) -> None:
        least = self.micro_batches.value
        if self.batch.value < least:
            with self.moving():
                self.batch.value = min(size for size in self.batch.options if size >= least)

    def _fit_micro_batches(self, _change: Any) -> None:
        most = self.batch.value
        if self.micro_batches.value > most:
            with self.moving():
                counts = self.micro_batches.options
                self.micro_batches.value = max(count for count in counts if count <= most)


def _menu(name: str, options: Any, value: Any) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=options, value=value, description=name, style=WIDE)


def _slider(name: str, options: Any, value: Any) -> ipywidgets.SelectionSlider:
    return ipywidgets.SelectionSlider(options=options, value=value, description=name, style=WIDE)
