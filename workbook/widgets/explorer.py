"""What all explorers share: controls above a figure that follows them."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets
import traitlets

from workbook.plots import CaptionedFigure
from workbook.widgets.idle import when_idle
from workbook.widgets.kept import kept_state

# How long a learner's pause is, after which the next figures are drawn.
_PAUSE_S = 0.15


class Explorer(ipywidgets.VBox):
    """Controls above a figure, drawn by a pure function of their values; each drawing is cached.

    The figures that the next move would show are drawn in the background.

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
        self._is_moving, self._moves = False, 0
        # JupyterLab may run the handlers of two changes in parallel. The lock shows one at a time:
        # the drawing of an earlier choice must not replace that of a later one.
        self._showing = threading.RLock()
        self._restore(draw)
        for control in controls:
            control.observe(self._show, "value")
        self._show()
        when_idle(self._draw_first_moves)

    def _restore(self, draw: Callable[..., CaptionedFigure]) -> None:
        """Set the controls to what they had when this cell ran the last time."""
        self._kept = kept_state(draw.__qualname__, *self._values())
        # Twice, since the range of a control may depend on another one.
        for control, value in [*zip(self._controls, self._kept.get("values", ()))] * 2:
            with contextlib.suppress(traitlets.TraitError):
                control.value = value

    def chosen(self) -> tuple:
        """The present values of the controls, the arguments of ``draw``."""
        return self._arguments(self._values())

    def _values(self) -> list[Any]:
        return [control.value for control in self._controls]

    def _arguments(self, values: list[Any]) -> tuple:
        """The arguments of ``draw`` for values of the controls."""
        return tuple(values)

    def close(self) -> None:
        """Remove controls and figure from the page, and stop listening to them."""
        self._moves += 1
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

    def _show(self, change: Any = None) -> None:
        """Draw the present values, which may be newer than the change that called this."""
        if self._is_moving:
            return
        with self._showing:
            self.view.value, self.caption = self._page(self.chosen())
            self._kept["values"] = self._values()
        if change is not None:
            self._moves += 1
            self._start_drawing(change.owner, change.old)

    def _draw_first_moves(self) -> None:
        if not self._moves:
            self._start_drawing(self._controls[0], None)

    def _start_drawing(self, moved: ipywidgets.ValueWidget, before: Any) -> None:
        """Draw what the moved control would show next, then what the others would."""
        others = [control for control in self._controls if control is not moved]
        keys = [*self._next(moved, before)]
        keys += [key for control in others for key in self._next(control, None)]
        if keys:
            work = (keys, self._moves)
            threading.Thread(target=self._draw_ahead, args=work, daemon=True).start()

    def _page(self, key: tuple) -> tuple[str, str]:
        """The figure of these arguments as HTML, and its caption."""
        if key not in self._pages:
            figure = self.draw(*key)
            # With this, screen readers read the caption aloud whenever it changes.
            spoken = '<figcaption role="status" aria-live="polite" '
            page = figure.html().replace("<figcaption ", spoken, 1)
            # Without this, lines in a widget are as high as buttons.
            self._pages[key] = f'<div style="line-height: 1.4">{page}</div>', figure.caption
        return self._pages[key]

    def _draw_ahead(self, keys: list[tuple], move: int) -> None:
        """Draw what may be shown next, until a control is moved again."""
        time.sleep(_PAUSE_S)
        for key in keys:
            if move != self._moves:
                return
            # A value that another control's value does not go with is never shown.
            with contextlib.suppress(ValueError):
                self._page(key)

    def _next(self, control: ipywidgets.ValueWidget, before: Any) -> Iterator[tuple]:
        """The arguments after one and two more moves in the same direction, and after one back."""
        place, offered = self._controls.index(control), _offered(control)
        now = offered.index(control.value)
        step = -1 if before in offered[now + 1 :] else 1
        for other in (now + step, now + 2 * step, now - step):
            if other in range(len(offered)):
                values = self._values()
                values[place] = offered[other]
                yield self._arguments(values)

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


def _offered(control: ipywidgets.ValueWidget) -> list[Any]:
    """All values of a control, in order."""
    if isinstance(control, ipywidgets.IntSlider):
        return list(range(control.min, control.max + 1))
    return [value for _, value in getattr(control, "_options_full", ())]


def _in_words(control: ipywidgets.ValueWidget) -> str:
    """``ranks 2 to 16`` for a slider; a menu with all its entries."""
    if isinstance(control, ipywidgets.IntSlider):
        return f"{control.description} {control.min} to {control.max}"
    if isinstance(control, ipywidgets.Dropdown):
        return f"{control.description} ({', '.join(control.options)})"
    return str(getattr(control, "description", ""))
