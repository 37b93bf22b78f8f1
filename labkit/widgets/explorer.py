"""What all explorers share: controls above a figure that follows them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ipywidgets

from labkit.plots import CaptionedFigure


class Explorer(ipywidgets.VBox):
    """Controls above a figure, drawn by a pure function of their values and kept once drawn.

    A subclass makes its controls, passes them to ``super().__init__``, and says what ``figure``
    draws and how it ``reads`` where there is no browser.

    Attributes:
        view: the figure as HTML: picture, alt text, and caption.
    """

    def __init__(
        self,
        *controls: ipywidgets.ValueWidget,
        rows: Sequence[ipywidgets.Widget] | None = None,
    ):
        """``rows`` are what stands above the figure, by default a row for each control."""
        self.view = ipywidgets.HTML()
        super().__init__([*(rows or controls), self.view])
        self._controls = controls
        self._pages: dict[tuple, str] = {}
        self._is_moving = False
        for control in controls:
            control.observe(self._show, "value")
        self._show()

    def chosen(self) -> tuple:
        """What the controls say now."""
        return tuple(control.value for control in self._controls)

    def figure(self, *chosen: Any) -> CaptionedFigure:
        raise NotImplementedError

    def reads(self, *chosen: Any) -> str:
        """The controls and the figure in words, for pages that stand still."""
        raise NotImplementedError

    def close(self) -> None:
        """Take controls and figure off the page; nothing listens to them any more."""
        for widget in _below(self):
            widget.unobserve_all("value")
            for part in (widget, widget.layout, getattr(widget, "style", None)):
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
        key = self.chosen()
        if key not in self._pages:
            page = self.figure(*key).html()
            # Screen readers say the caption whenever it changes.
            spoken = '<figcaption role="status" aria-live="polite" '
            page = page.replace("<figcaption ", spoken, 1)
            # Widgets have lines as high as buttons.
            self._pages[key] = f'<div style="line-height: 1.4">{page}</div>'
        self.view.value = self._pages[key]

    def __repr__(self) -> str:
        return self.reads(*self.chosen())

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # The base class cuts the text, which is all that a stored notebook keeps of a widget.
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": repr(self)}


def _below(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """All that is inside a widget, and inside that."""
    for child in getattr(widget, "children", ()):
        yield child
        yield from _below(child)
