"""A model cut into stages: layers in a row, cuts that are dragged, and one step below."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from torch import nn
from traitlets import Dict, Float, Int, List, Unicode

from labkit.costs.link import Link
from labkit.placement.planner import Profile, best_split
from labkit.schedules.split_points import check_split_points
from labkit.training.measured import MeasuredSplit, measure_profile, measure_split
from labkit.units import check_choice, format_seconds
from workbook.plots.split_costs import cuts_words, split_caption
from workbook.widgets.explorer import cell_state
from workbook.widgets.job import Job
from workbook.widgets.split_choice import (
    HERE,
    MAX_STAGES,
    MICRO_BATCHES,
    Choice,
    SplitModels,
    layer_data,
    step_data,
    step_numbers,
    ticks,
)

_HERE = Path(__file__).parent
_SETTINGS = ("points", "link", "micro_batches", "schedule", "batch_size")


def split_explorer(
    profile: Profile | nn.Module,
    link: Link | None = None,
    *,
    split_points: Sequence[int] | None = None,
    micro_batches: int = 1,
    schedule: str = "gpipe",
    batch_size: int = 16,
    input_shape: tuple[int, ...] = (3, 32, 32),
    frozen: int = 0,
    measure: Callable[..., MeasuredSplit] = measure_split,
) -> "SplitPicture":
    """Explore where to cut a model: drag the cuts, see the predicted step, and measure it.

    Its static twin is ``plots.split_costs``.

    Args:
        profile: the model's layers, or your own chain of layers, which is measured here.
        link: between two stages on this machine; None leaves only ``split_choice.LINKS``.
        split_points: to start with, 1 to 3; by default one cut in the middle of the layers.
        micro_batches: to start with, one of ``MICRO_BATCHES``, at most the batch size.
        schedule: to start with, ``gpipe`` or ``1f1b``.
        batch_size: to start with, if a chain of layers is given.
        input_shape: of one sample, for the run.
        frozen: the number of layers, from the first on, that are not trained.
        measure: what Run calls, with the arguments of ``training.measured.measure_split``.

    Raises:
        ValueError: a start that its control does not offer, or a model that cannot be cut.
    """
    model: str | nn.Module
    if isinstance(profile, Profile):
        model = profile.model
    else:
        model = profile
        profile = measure_profile(model, batch_size=batch_size, input_shape=input_shape)
    size = profile.batch_size
    possible = [count for count in MICRO_BATCHES if count <= size]
    if micro_batches not in possible:
        known = ", ".join(map(str, possible))
        raise ValueError(
            f"micro_batches is one of {known} for a batch of {size}, got {micro_batches!r}"
        )
    points = (len(profile.layers) // 2,) if split_points is None else tuple(split_points)
    models = SplitModels(profile, link, frozen)
    start = Choice(points, next(iter(models.links)), micro_batches, schedule, size)
    models.predicted(start)  # refuses impossible settings
    run = partial(measure, model, input_shape=tuple(input_shape), frozen=frozen)
    # Of another model, what was measured of this one must not be shown.
    layers = [(one.name, one.output_bytes, one.parameter_bytes) for one in profile.layers]
    state = cell_state(profile.model, *layers, frozen, *models.links, *start)
    return SplitPicture(models, run, start, state)


class SplitPicture(anywidget.AnyWidget):
    """Layers in a row, cuts that are dragged, and the step that the model predicts.

    The browser moves the cuts and sends each setting that the learner changes; what it draws of a
    step comes from here, as ``shown``.

    Attributes:
        points: the split points, 1 to 3.
        link, batch_size, micro_batches, schedule: the settings of the step.
        objective, cap_bytes: what is best, and the memory that a stage may need (None: no limit).
        mode: layers are as wide as their compute (``compute``) or as tall as their ``bytes``.
        busy: what a button is doing; empty if nothing.
        status: what a button has done.
        pressed: the button that was pressed last in the browser, and the how many-th press it was.
        runs: by choice, what was measured on this machine.
    """

    _esm = _HERE / "split_explorer.js"
    _css = _HERE / "split_explorer.css"

    options = Dict().tag(sync=True)
    points = List(Int()).tag(sync=True)
    link = Unicode().tag(sync=True)
    batch_size = Int().tag(sync=True)
    micro_batches = Int().tag(sync=True)
    schedule = Unicode().tag(sync=True)
    objective = Unicode("step").tag(sync=True)
    cap_bytes = Float(None, allow_none=True).tag(sync=True)
    mode = Unicode("compute").tag(sync=True)
    busy = Unicode().tag(sync=True)
    status = Unicode().tag(sync=True)
    shown = Dict().tag(sync=True)
    pressed = List().tag(sync=True)

    def __init__(
        self,
        models: SplitModels,
        measure: Callable[..., MeasuredSplit],
        start: Choice,
        state: dict[str, Any],
    ):
        self._models, self._measure, self._state = models, measure, state
        self.runs: dict[Choice, MeasuredSplit] = state.setdefault("runs", {})
        self._job = Job(self._say)
        self._axis: tuple[tuple, float] = (), 0.0
        settings = {**start._asdict(), "points": list(start.points), **state.get("settings", {})}
        super().__init__(options=models.offered(start.batch_size), **settings)
        self.observe(self._act, "pressed")
        self.observe(self._draw, [*_SETTINGS, "cap_bytes"])
        self.observe(self._keep, [*_SETTINGS, "objective", "cap_bytes", "mode"])
        self._draw()

    def chosen(self) -> Choice:
        counts = self.micro_batches, self.schedule, self.batch_size
        return Choice(tuple(self.points), self.link, *counts)

    def measured(self) -> MeasuredSplit | None:
        """What was measured of this split; on which link it was predicted does not matter."""
        return self.runs.get(self.chosen()._replace(link=HERE))

    def run(self) -> None:
        """Measure the split, as the button does: in the background."""
        choice = self.chosen()
        self._job.start("measuring ...", lambda: self._run(choice))

    def best(self) -> None:
        """Move the cuts to the best ones, as the button does: in the background."""
        self._job.start("searching ...", self._move_to_best)

    def stop(self) -> None:
        """Stop what a button has started."""
        self._job.stop()

    def join(self) -> None:
        """Wait until a button's work has ended."""
        self._job.join()

    def __repr__(self) -> str:
        """The controls and the numbers, for pages without a kernel."""
        models, choice = self._models, self.chosen()
        num_layers = len(models.measured.layers)
        return (
            f"[picture and buttons] stages 2 to {self.options['stages'][-1]}, a cut before any of "
            f"{num_layers} layers, link ({', '.join(models.links)}), batch, micro-batches, "
            f"schedule; Best split, Run. {models.title(choice)}, {cuts_words(choice.points)}. "
            f"{split_caption(models.predicted(choice), self.measured())}"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        # The base class shortens the text, and a stored notebook keeps nothing else of a widget.
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/plain": repr(self)}, metadata

    def _draw(self, _change: Any = None) -> None:
        models, choice, run = self._models, self.chosen(), self.measured()
        profile, split = models.profile(choice.batch_size), models.predicted(choice)
        whole = models.whole_bytes(choice.batch_size)
        step = step_data(split, len(profile.layers), run, whole, self.cap_bytes)
        # While only cuts move, the axis grows and never shrinks.
        settings, end_s = (len(choice.points), *choice[1:]), self._axis[1]
        if settings != self._axis[0] or step["last_s"] > end_s:
            end_s = 1.1 * step["last_s"]
        self._axis = settings, end_s
        caption = split_caption(split, run)
        self.shown = step | {
            "points": list(choice.points),
            "layers": layer_data(profile, models.frozen),
            "title": models.title(choice),
            "caption": f"{cuts_words(choice.points)}. {caption}",
            "end_s": end_s,
            "ticks": ticks(end_s),
        }

    def _keep(self, _change: Any) -> None:
        names = [*_SETTINGS, "objective", "cap_bytes", "mode"]
        self._state["settings"] = {name: getattr(self, name) for name in names}

    def _act(self, change: dict) -> None:
        {"run": self.run, "best": self.best, "stop": self.stop}[change["new"][0]]()

    def _say(self, doing: str, said: str) -> None:
        self.busy, self.status = doing, said

    def _run(self, choice: Choice) -> str:
        names = ("batch_size", "micro_batches", "schedule")
        measured = self._measure(choice.points, **{name: getattr(choice, name) for name in names})
        self.runs[choice._replace(link=HERE)] = measured
        self._draw()
        step = format_seconds(statistics.median(measured.step_s))
        where = "" if choice.link == HERE else f", on {HERE}, not over {choice.link}"
        return f"measured, {cuts_words(choice.points)}: {step} per step{where}"

    def _move_to_best(self) -> str:
        choice, cap_bytes = self.chosen(), self.cap_bytes
        before = self._models.predicted(choice)
        best = best_split(
            self._models.profile(choice.batch_size),
            len(choice.points) + 1,
            **self._models.settings(choice),
            objective=self.objective,
            memory_cap_bytes=cap_bytes,
        )
        self.points = list(best.split_points)
        said = f"best by the model, {cuts_words(best.split_points)}"
        if best.split_points == before.split_points:
            return f"{said}, where the cuts are already"
        changes = [
            f"{name} {old} -> {new}"
            for (name, old, _), (_, new, _) in zip(step_numbers(before), step_numbers(best))
            if old != new
        ]
        return f"{said}: {', '.join(changes)}"

    @traitlets.validate("points")
    def _check_points(self, proposal: dict) -> list[int]:
        points = proposal["value"]
        if not 1 <= len(points) < MAX_STAGES:
            raise ValueError(f"it shows 2 to {MAX_STAGES} stages, got {len(points) + 1}")
        return list(check_split_points(points, len(self._models.measured.layers)))

    @traitlets.validate("link", "schedule", "batch_size", "micro_batches")
    def _check_offered(self, proposal: dict) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if value not in self.options[name]:
            check_choice(name, value, list(map(str, self.options[name])))
        return value
