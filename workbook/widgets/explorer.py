"""Controls above a figure that follows them, and work of a button: what all explorers share."""

import html
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets

from workbook.plots import CaptionedFigure


class Job:
    """Runs a function in a thread, one at a time, and says how it went.

    A button's handler that worked for seconds would hold up all other messages.
    """

    def __init__(self, say: Callable[[str, str], None]):
        """``say(doing, said)`` is called at the start and at the end, then ``doing`` is empty."""
        self._say = say
        # Held until it is said: a press that follows at once must not be told of the job before.
        self._lock = threading.Lock()
        self._is_running = False
        self._thread: threading.Thread | None = None

    def start(self, doing: str, work: Callable[[], str]) -> None:
        """Begin ``work``, which returns what is to be said; does nothing during another job."""
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
            self._say(doing, "")
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until no job is running, and the last one has said how it went."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, work: Callable[[], str]) -> None:
        try:
            message = work()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        with self._lock:
            self._is_running = False
            self._say("", message)


class Printed(ipywidgets.VBox):
    """Widgets whose text is what ``repr`` says: a stored notebook keeps nothing else of them."""

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # The base class shortens the text.
        return {**(super()._repr_mimebundle_(**kwargs) or {}), "text/plain": repr(self)}


def as_page(figure: CaptionedFigure) -> str:
    """A figure as HTML for a widget; screen readers read its caption aloud when it changes."""
    spoken = '<figcaption role="status" aria-live="polite" '
    page = figure.html().replace("<figcaption ", spoken, 1)
    # Without this, lines in a widget are as high as buttons.
    return f'<div style="line-height: 1.4">{page}</div>'


class Explorer(Printed):
    """Controls above a figure, drawn by a pure function of their values.

    ``view`` has the figure as HTML, ``caption`` its caption; each control is under its name.
    ``job`` is what a button does in the background, if there is one.
    """

    job: Job | None = None

    def __init__(
        self,
        draw: Callable[..., CaptionedFigure],
        adjust: Callable[[], None] = lambda: None,
        **controls: ipywidgets.ValueWidget,
    ):
        """``adjust`` moves controls whose range depends on another one, before a drawing."""
        self.draw = draw
        self._adjust = adjust
        self.view = ipywidgets.HTML()
        self.caption = ""
        self._controls: list[Any] = list(controls.values())
        vars(self).update(controls)
        super().__init__([*self._controls, self.view])
        # JupyterLab may run the handlers of two changes in parallel: the drawing of an earlier
        # choice must not replace that of a later one.
        self._lock = threading.RLock()
        self._is_adjusting = False
        for control in self._controls:
            control.observe(self._show, "value")
        self._show()

    def chosen(self) -> tuple:
        """The present values of the controls, the arguments of ``draw``."""
        return tuple(control.value for control in self._controls)

    def _show(self, _change: Any = None) -> None:
        """Draw the present values, which may be newer than the change that called this."""
        with self._lock:
            if self._is_adjusting:
                return
            self._is_adjusting = True
            self._adjust()
            self._is_adjusting = False
            figure = self.draw(*self.chosen())
            self.view.value = as_page(figure)
            self.caption = figure.caption

    def __repr__(self) -> str:
        """The controls and the caption in words, for pages without a kernel."""
        words = []
        for control in self._controls:
            name = control.description
            if isinstance(control, ipywidgets.IntSlider):
                name += f" {control.min} to {control.max}"
            elif isinstance(control, ipywidgets.Dropdown):
                name += f" ({', '.join(control.options)})"
            words.append(name)
        return f"[sliders] {', '.join(words)}. {self.caption}"

    def add_run_button(self, doing: str, measure: Callable[..., CaptionedFigure]) -> None:
        """Add a button that draws ``measure(*chosen)`` in a thread, below the figure."""
        button = ipywidgets.Button(description="Run")
        output = ipywidgets.HTML()

        def say(doing: str, message: str) -> None:
            button.disabled = bool(doing)
            output.value = message
            if not message.startswith("<"):
                output.value = html.escape(doing or message)

        job = Job(say)
        button.on_click(lambda _: job.start(doing, lambda: as_page(measure(*self.chosen()))))
        self.children = [*self.children, button, output]
        self.job = job
