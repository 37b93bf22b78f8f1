"""The kernel's side of the picture: its state, and what Run and Best split do."""

import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from traitlets import Dict, Float, Int, List, Unicode

from labkit.schedules.split_points import check_split_points
from labkit.tracing import Span
from labkit.training.split_run import MeasuredSplit
from labkit.units import check_choice
from workbook.widgets.job import Job
from workbook.widgets.split_choice import Choice, check_stages, offered
from workbook.widgets.split_work import SplitWork

_HERE = Path(__file__).parent
# Each after what it imports.
_SCRIPTS = ("elements", "words", "split_model", "split_looks", "split_row", "split_lanes")
_SCRIPTS += ("split_controls", "split_picture")
_IMPORT = re.compile(r'^import \{[^}]+\} from "\./[\w.]+";\n', re.MULTILINE)

# What stays when the cell is run again.
_KEPT = ["points", "link", "batch_size", "micro_batches", "schedule", "objective", "cap_bytes"]
_KEPT += ["mode", "measured"]


def script() -> str:
    """The browser's side as one module: a widget is loaded from text, which imports no files."""
    return "\n".join(_IMPORT.sub("", (_HERE / f"{name}.js").read_text()) for name in _SCRIPTS)


class SplitPicture(anywidget.AnyWidget):
    """Layers in a row, cuts that are dragged, and the step that the model predicts.

    The browser computes what it shows. It sends a setting when the learner has changed it; a
    setting that Python changes moves the picture.

    Attributes:
        points: the split points, 1 to 3.
        link, batch_size, micro_batches, schedule: the settings of the step.
        objective, cap_bytes: what is best, and the memory that a stage may need (None: no limit).
        mode: layers are as wide as their compute (``compute``) or as tall as their ``bytes``.
        busy: what a button is doing; empty if nothing.
        status: what a button has done.
        measured: what was measured, split after split.
    """

    _esm = script()
    _css = (_HERE / "split_picture.css").read_text()

    profile = Dict().tag(sync=True)
    links = Dict().tag(sync=True)
    options = Dict().tag(sync=True)
    frozen = Int().tag(sync=True)
    points = List(Int()).tag(sync=True)
    link = Unicode().tag(sync=True)
    batch_size = Int().tag(sync=True)
    micro_batches = Int().tag(sync=True)
    schedule = Unicode().tag(sync=True)
    objective = Unicode("step").tag(sync=True)
    cap_bytes = Float(None, allow_none=True).tag(sync=True)
    mode = Unicode("compute").tag(sync=True)
    measured = List(Dict()).tag(sync=True)
    busy = Unicode().tag(sync=True)
    status = Unicode().tag(sync=True)

    def __init__(self, work: SplitWork, start: Choice):
        self._work, self._job = work, Job(self._say)
        models = work.models
        super().__init__(
            profile=asdict(models.measured),
            links={name: asdict(link) for name, link in models.links.items()},
            options=offered(models, start),
            frozen=models.frozen,
            **{**start._asdict(), "points": list(start.points), **work.kept.get("picture", {})},
        )
        self.on_msg(self._answer)
        self.observe(self._keep, _KEPT)

    def chosen(self) -> Choice:
        counts = self.micro_batches, self.schedule, self.batch_size
        return Choice(tuple(self.points), self.link, *counts)

    def run(self) -> None:
        """Measure the split, as the button does: in the background."""
        choice = self.chosen()
        self._job.start("measuring ...", lambda: self._measure(choice))

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
        return f"[picture and buttons] {self._work.in_words(self.chosen())}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        # The base class shortens the text, and a stored notebook keeps nothing else of a widget.
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/plain": repr(self)}, metadata

    def _answer(self, _widget: Any, content: dict, _buffers: Any) -> None:
        """A button was pressed in the browser."""
        actions = {"run": self.run, "best": self.best, "stop": self.stop}
        if action := actions.get(content.get("kind", "")):
            action()

    def _keep(self, _change: Any) -> None:
        self._work.kept["picture"] = {name: getattr(self, name) for name in _KEPT}

    def _say(self, doing: str, said: str) -> None:
        self.busy, self.status = doing, said

    def _measure(self, choice: Choice) -> str:
        measured, said = self._work.run(choice)
        self.measured = [*self.measured, _as_data(measured)]
        return said

    def _move_to_best(self) -> str:
        best, why = self._work.best(self.chosen(), self.objective, self.cap_bytes)
        self.points = list(best.split_points)
        return why

    @traitlets.validate("points")
    def _check_points(self, proposal: dict) -> list[int]:
        layers, points = self._work.models.measured.layers, proposal["value"]
        check_stages(points)
        return list(check_split_points(points, len(layers)))

    @traitlets.validate("link", "schedule", "batch_size", "micro_batches")
    def _check_offered(self, proposal: dict) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if value not in self.options[name]:
            check_choice(name, value, [str(offered) for offered in self.options[name]])
        return value


def _as_data(measured: MeasuredSplit) -> dict[str, Any]:
    """A measurement for the browser: medians over the steps, and the spans of a typical step."""
    step = measured.typical_step()
    spans = [data for span in step.spans if (data := _span_as_data(span, step.spans[0].start_s))]
    compute_s = [f + b for f, b in zip(measured.forward_s, measured.backward_s)]
    hops = [*measured.forward_hop_s, *measured.backward_hop_s]
    step_s = statistics.median(measured.step_s)
    return {
        "points": list(measured.split_points),
        "batch_size": measured.batch_size,
        "micro_batches": measured.micro_batches,
        "schedule": measured.schedule,
        "step_s": step_s,
        "end_s": max([step_s, *(span["end_s"] for span in spans)]),
        "bubble": 1 - sum(compute_s) / (len(compute_s) * step_s),
        "largest_s": max(compute_s),
        "hops_s": sum(statistics.median(hop) for hop in hops if hop),
        "memory_bytes": measured.memory_bytes,
        "spans": spans,
    }


def _span_as_data(span: Span, origin_s: float) -> dict[str, Any] | None:
    """A span of one lane; None for waiting, where nothing is drawn."""
    kind = span.kind
    if kind == "communicate" and span.peer is not None:
        # What a stage sends to the next one, or gets from the one before, is an activation.
        is_forward = (span.peer > span.rank) == bool(span.num_bytes)
        kind = "activation" if is_forward else "gradient"
    if kind not in ("forward", "backward", "activation", "gradient", "update"):
        return None
    times = {"start_s": span.start_s - origin_s, "end_s": span.end_s - origin_s}
    return {"stage": span.rank, "kind": kind, **times}
