"""What all explorers share: controls above a figure that follows them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets

from labkit.plots import CaptionedFigure


class Explorer(ipywidgets.VBox):
    """Controls above a figure, which is drawn by a pure function of their values and kept.

    Attributes:
        draw: from what ``chosen`` returns to the figure.
        view: the figure as HTML: picture, alt text, and caption.
        caption: the caption alone.
        (each control that has a name, by its name)
    """

    def __init__(
        self,
        draw: Callable[..., CaptionedFigure],
        *controls: ipywidgets.ValueWidget,
        rows: Sequence[ipywidgets.Widget] | None = None,
        **named: ipywidgets.ValueWidget,
    ):
        """``rows`` are what stands above the figure, by default a row for each control."""
        self.draw = draw
        self.view = ipywidgets.HTML()
        self.caption = ""
        self._controls = controls = (*controls, *named.values())
        vars(self).update(named)
        super().__init__([*(rows or controls), self.view])
        self._pages: dict[tuple, tuple[str, str]] = {}
        self._is_moving = False
        # JupyterLab may carry out two changes side by side. One after the other they are shown:
        # the drawing of an earlier choice must not replace that of a later one.
        self._showing = threading.RLock()
        for control in controls:
            control.observe(self._show, "value")
        self._show()

    def chosen(self) -> tuple:
        """What the controls say now."""
        return tuple(control.value for control in self._controls)

    def close(self) -> None:
        """Take controls and figure off the page; nothing listens to them any more."""
        for widget in _below(self):
            widget.unobserve_all("value")
            for part in (widget, *(getattr(widget, name, None) for name in ("layout", "style"))):
                if isinstance(part, ipywidgets.Widget):
                    part.close()
        self.layout.close()
        super().close()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Where one control moves others: nothing is shown before all are in their places."""
        self._is_moving = True
        try:
            yield
        finally:
            self._is_moving = False

    def _show(self, _change: Any = None) -> None:
        """Show what the controls say now, which may be later than the change that called."""
        if self._is_moving:
            return
        with self._showing:
            key = self.chosen()
            if key not in self._pages:
                figure = self.draw(*key)
                # Screen readers say the caption whenever it changes.
                spoken = '<figcaption role="status" aria-live="polite" '
                page = figure.html().replace("<figcaption ", spoken, 1)
                # Widgets have lines as high as buttons.
                self._pages[key] = f'<div style="line-height: 1.4">{page}</div>', figure.caption
            self.view.value, self.caption = self._pages[key]

    def __repr__(self) -> str:
        """The controls and the figure in words, for pages without a kernel."""
        return f"[sliders] {', '.join(map(_in_words, self._controls))}. {self.caption}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # The base class cuts the text, which is all that a stored notebook keeps of a widget.
        return {**(super()._repr_mimebundle_(**kwargs) or {}), "text/plain": repr(self)}


def _below(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """All that is inside a widget, and inside that."""
    for child in getattr(widget, "children", ()):
        yield child
        yield from _below(child)


def _in_words(control: ipywidgets.ValueWidget) -> str:
    """``ranks 2 to 16``, or a list with all its entries."""
    if isinstance(control, ipywidgets.IntSlider):
        return f"{control.description} {control.min} to {control.max}"
    if isinstance(control, ipywidgets.Dropdown):
        return f"{control.description} ({', '.join(control.options)})"
    return str(getattr(control, "description", ""))
