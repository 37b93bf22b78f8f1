"""What the explorers share: controls above a figure that follows them, and their state."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import ipywidgets
import traitlets
from IPython.core.getipython import get_ipython

from workbook.plots import CaptionedFigure
from workbook.widgets.job import Job

_STATES: dict[tuple[Hashable, ...], dict[str, Any]] = {}


def cell_state(*start: Hashable) -> dict[str, Any]:
    """The state that the widget of this cell left when the cell ran before; at first empty.

    Args:
        start: with what the widget starts; a cell that was changed to start otherwise does so.
    """
    parent = getattr(get_ipython(), "get_parent", dict)()
    cell = parent.get("metadata", {}).get("cellId")
    return _STATES.setdefault((cell, *start), {}) if cell else {}


def as_page(figure: CaptionedFigure) -> str:
    """A figure as HTML for a widget; screen readers read its caption aloud when it changes."""
    spoken = '<figcaption role="status" aria-live="polite" '
    page = figure.html().replace("<figcaption ", spoken, 1)
    # Without this, lines in a widget are as high as buttons.
    return f'<div style="line-height: 1.4">{page}</div>'


class Explorer(ipywidgets.VBox):
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
        self.draw, self._adjust = draw, adjust
        self.view, self.caption = ipywidgets.HTML(), ""
        self._controls: list[Any] = list(controls.values())
        vars(self).update(controls)
        super().__init__([*self._controls, self.view])
        # JupyterLab may run the handlers of two changes in parallel: the drawing of an earlier
        # choice must not replace that of a later one.
        self._lock, self._is_adjusting = threading.RLock(), False
        self._state = cell_state(draw.__qualname__, *self.chosen())
        for control, value in [*zip(self._controls, self._state.get("values", ()))] * 2:
            # Twice: the first adjustment may make room for a value.
            try:
                control.value = value
            except traitlets.TraitError:
                continue
            adjust()
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
            self.view.value, self.caption = as_page(figure), figure.caption
            self._state["values"] = self.chosen()

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

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # The base class shortens the text, and a stored notebook keeps nothing else of a widget.
        return {**(super()._repr_mimebundle_(**kwargs) or {}), "text/plain": repr(self)}
