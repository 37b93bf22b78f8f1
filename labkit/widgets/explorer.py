"""What all explorers share: controls above a figure that follows them."""

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

    def __init__(self, *controls: ipywidgets.ValueWidget):
        self.view = ipywidgets.HTML()
        super().__init__([*controls, self.view])
        self._pages: dict[tuple, str] = {}
        for control in controls:
            control.observe(self._show, "value")
        self._show()

    def chosen(self) -> tuple:
        """What the controls say now."""
        *controls, _ = self.children
        return tuple(control.value for control in controls)

    def figure(self, *chosen: Any) -> CaptionedFigure:
        raise NotImplementedError

    def reads(self, *chosen: Any) -> str:
        """The controls and the figure in words, for pages that stand still."""
        raise NotImplementedError

    def close(self) -> None:
        """Take controls and figure off the page; nothing listens to them any more."""
        for child in self.children:
            child.unobserve_all("value")
            child.close()
        super().close()

    def _show(self, _change: Any = None) -> None:
        """Show what the controls say now, which may be later than the change that called."""
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
