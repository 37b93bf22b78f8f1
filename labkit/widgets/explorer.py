"""What all explorers share: controls above a figure that follows them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets

from labkit.plots import CaptionedFigure


class Explorer(ipywidgets.VBox):
    """Controls above a figure, drawn by a pure function of their values; each drawing is cached.

    Attributes:
        draw: makes the figure from the values that ``chosen`` returns.
        view: the figure as HTML: picture, alt text, and caption.
        caption: the caption alone.
        (each named control): under its name.
    """

    def __init__(
        self,
        draw: Callable[..., CaptionedFigure],
        *controls: ipywidgets.ValueWidget,
        rows: Sequence[ipywidgets.Widget] | None = None,
        **named: ipywidgets.ValueWidget,
    ):
        """``rows`` are the widgets above the figure, by default one row per control."""
        self.draw = draw
        self.view = ipywidgets.HTML()
        self.caption = ""
        self._controls = controls = (*controls, *named.values())
        vars(self).update(named)
        super().__init__([*(rows or controls), self.view])
        self._pages: dict[tuple, tuple[str, str]] = {}
        self._is_moving = False
        # JupyterLab may run the handlers of two changes in parallel. The lock shows one at a time:
        # the drawing of an earlier choice must not replace that of a later one.
        self._showing = threading.RLock()
        for control in controls:
            control.observe(self._show, "value")
        self._show()

    def chosen(self) -> tuple:
        """The present values of the controls, the arguments of ``draw``."""
        return tuple(control.value for control in self._controls)

    def close(self) -> None:
        """Remove controls and figure from the page, and stop listening to them."""
        for widget in _below(self):
            widget.unobserve_all("value")
            for part in (widget, *(getattr(widget, name, None) for name in ("layout", "style"))):
                if isinstance(part, ipywidgets.Widget):
                    part.close()
        self.layout.close()
        super().close()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Pause drawing while one control moves others, until all have their new values."""
        self._is_moving = True
        try:
            yield
        finally:
            self._is_moving = False

    def _show(self, _change: Any = None) -> None:
        """Draw the present values, which may be newer than the change that called this."""
        if self._is_moving:
            return
        with self._showing:
            key = self.chosen()
            if key not in self._pages:
                figure = self.draw(*key)
                # With this, screen readers read the caption aloud whenever it changes.
                spoken = '<figcaption role="status" aria-live="polite" '
                page = figure.html().replace("<figcaption ", spoken, 1)
                # Without this, lines in a widget are as high as buttons.
                self._pages[key] = f'<div style="line-height: 1.4">{page}</div>', figure.caption
            self.view.value, self.caption = self._pages[key]

    def __repr__(self) -> str:
        """The controls and the caption in words, for pages without a kernel."""
        return f"[sliders] {', '.join(map(_in_words, self._controls))}. {self.caption}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # The base class shortens the text, and a stored notebook keeps nothing else of a widget.
        return {**(super()._repr_mimebundle_(**kwargs) or {}), "text/plain": repr(self)}


def _below(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """All widgets inside a widget, at any depth."""
    for child in getattr(widget, "children", ()):
        yield child
        yield from _below(child)


def _in_words(control: ipywidgets.ValueWidget) -> str:
    """``ranks 2 to 16`` for a slider; a menu with all its entries."""
    if isinstance(control, ipywidgets.IntSlider):
        return f"{control.description} {control.min} to {control.max}"
    if isinstance(control, ipywidgets.Dropdown):
        return f"{control.description} ({', '.join(control.options)})"
    return str(getattr(control, "description", ""))
