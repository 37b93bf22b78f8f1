"""A model cut into stages, with sliders above a figure: for browsers without the picture."""

import html
from collections.abc import Iterator
from typing import Any

import ipywidgets

from workbook import plots
from workbook.widgets.cut_sliders import WIDE, CutSliders
from workbook.widgets.explorer import Explorer
from workbook.widgets.job import Job
from workbook.widgets.split_choice import HERE, Choice, offered
from workbook.widgets.split_work import SplitWork


class SplitSliders(Explorer):
    """Controls and buttons above a figure.

    Attributes:
        stages: the slider of the number of stages, 2 to 4.
        cuts: the sliders of the split points; one that is moved pushes the others.
        link, batch, micro_batches, schedule: the other controls of the figure. Every micro-batch
            needs a sample, so ``batch`` and ``micro_batches`` may move each other.
        best: the button that moves the cuts to the best ones, by ``objective``, with at most
            ``cap`` bytes per stage.
        run: the button that measures the split. The figure shows measured bars whenever the
            controls have the values of a measured run. An error of the run is shown, not raised.
        stop: the button that stops a run or a search.
        status: what a button is doing, or has done.
    """

    def __init__(self, work: SplitWork, start: Choice):
        self._work, self._models, self._job = work, work.models, Job(self._say)
        self._make_controls(start)
        # Observed before the Explorer's own handler: the other controls move before the drawing.
        self.stages.observe(self._resize, "value")
        self.micro_batches.observe(self._fit_batch, "value")
        self.batch.observe(self._fit_micro_batches, "value")
        for slider in self.cuts.sliders:
            slider.observe(self._push, "value")
        self._clicks = {"Best split": self._find_best, "Run": self._run, "Stop": self._stop}
        self.best, self.run, self.stop = self._buttons = [
            ipywidgets.Button(description=name) for name in self._clicks
        ]
        self.stop.disabled = True
        for button in self._buttons:
            button.on_click(self._clicks[button.description])
        self.status = ipywidgets.HTML()
        rows = [
            ipywidgets.HBox([self.stages, self.link]),
            *self.cuts.rows,
            ipywidgets.HBox([self.batch, self.micro_batches, self.schedule]),
            ipywidgets.HBox([self.objective, self.cap]),
            ipywidgets.HBox([*self._buttons, self.status]),
        ]
        controls = (self.stages, self.link, self.batch, self.micro_batches, self.schedule)
        super().__init__(self._draw_split, *self.cuts.sliders, *controls, rows=rows)

    def _make_controls(self, start: Choice) -> None:
        options = offered(self._models, start)
        names = [layer.name for layer in self._models.measured.layers]
        most = options["stages"][-1]
        self.stages = ipywidgets.IntSlider(
            len(start.points) + 1, 2, most, description="stages", style=WIDE
        )
        self.cuts = CutSliders(names, most - 1)
        self.cuts.move(start.points)
        self.batch = _slider("batch", options["batch_size"], start.batch_size)
        self.micro_batches = _slider(
            "micro-batches", options["micro_batches"], start.micro_batches
        )
        self.schedule = _menu("schedule", options["schedule"], start.schedule)
        self.link = _menu("link", options["link"], start.link)
        self.objective = _menu("best has", options["objective"], "step")
        self.cap = _menu("a stage holds", options["cap_bytes"], None)

    def chosen(self) -> Choice:
        counts = self.micro_batches.value, self.schedule.value, self.batch.value
        return Choice(self.cuts.points, self.link.value, *counts)

    def _next(self, control: ipywidgets.ValueWidget, before: Any) -> Iterator[tuple]:
        # A move of one cut may move others, so it is not known what comes next.
        return iter(())

    def join(self) -> None:
        """Wait until a button's work has ended."""
        self._job.join()

    def _draw_split(self, *chosen: Any) -> plots.CaptionedFigure:
        choice = Choice(*chosen)
        measured = self._work.measured(choice)
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
        return f"[sliders and buttons] {self._work.in_words(self.chosen())}"

    def close(self) -> None:
        for button in self._buttons:
            button.on_click(self._clicks[button.description], remove=True)
        super().close()

    def _run(self, _button: Any) -> None:
        choice = self.chosen()
        self._job.start("measuring ...", lambda: self._measure(choice))

    def _find_best(self, _button: Any) -> None:
        self._job.start("searching ...", self._move_to_best)

    def _stop(self, _button: Any) -> None:
        self._job.stop()

    def _say(self, doing: str, said: str) -> None:
        self.best.disabled = self.run.disabled = bool(doing)
        self.stop.disabled = not doing
        # A worker's traceback has many lines.
        style = "white-space: pre-wrap; max-height: 15em; overflow: auto; line-height: 1.4"
        words = html.escape(doing or said)
        self.status.value = f'<div role="status" style="{style}">{words}</div>'

    def _measure(self, choice: Choice) -> str:
        _, said = self._work.run(choice)
        with self._showing:
            self._pages.clear()
            self._show()
        return said

    def _move_to_best(self) -> str:
        best, why = self._work.best(self.chosen(), self.objective.value, self.cap.value)
        with self.moving():
            self.cuts.move(best.split_points)
        self._show()
        return why

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
