"""The field in which a prediction is typed, in a notebook."""

import html
import threading
from typing import Any

import ipywidgets

_ENTER = "Type it and press Enter."
_LOCKS = "It is locked when it is measured."
_WRAP = {"flex_flow": "row wrap"}


class PredictionForm(ipywidgets.VBox):
    """A field with its quantity and unit, and below it what was entered, or the measurement.

    Attributes:
        field: the text; Enter or leaving the field confirms it.
        fix, again: the buttons.
        said: what is known about the prediction, as HTML that screen readers read aloud.
    """

    def __init__(self, prediction: Any):
        self._prediction = prediction
        self._lock = threading.RLock()
        self.field = ipywidgets.Text(
            value=_typed(prediction),
            description=_label(prediction),
            placeholder="no prediction yet",
            continuous_update=False,
            style={"description_width": "initial"},
            # With a long quantity, the field stands below it.
            layout={"width": "auto", "height": "auto", "max_width": "100%", **_WRAP},
        )
        self.fix = ipywidgets.Button(description="Fix it", layout={"width": "auto"})
        self.again = ipywidgets.Button(description="Predict again", layout={"width": "auto"})
        self.said = ipywidgets.HTML()
        # JupyterLab's look of tables, in the theme's colours.
        self.said.add_class("jp-RenderedHTMLCommon")
        row = ipywidgets.HBox([self.field, self.fix, self.again], layout=_WRAP)
        super().__init__([row, self.said])
        self.field.observe(self._enter, "value")
        self.fix.on_click(self._enter)
        self.again.on_click(self._begin_again)
        self.refresh()

    def refresh(self) -> None:
        """Show the prediction as it is now."""
        with self._lock:
            locked = self._prediction.locked_at is not None
            if locked and self.field.value.strip():
                self._type(_typed(self._prediction))
            self.field.disabled = locked
            self.fix.layout.display = "none" if locked else None
            self.again.layout.display = None if locked else "none"
            self._say(self._state())

    def _state(self) -> str:
        prediction = self._prediction
        if prediction.locked_at is None:
            text = html.escape(prediction.text)
            entered = f"Your prediction: <strong>{text}</strong>." if text else _ENTER
            return f"{entered} {_LOCKS}"
        table = prediction.row._repr_html_() if prediction.row else ""
        return f"{table}<p>Locked since it was measured, {prediction.since}.</p>"

    def _enter(self, _event: Any = None) -> None:
        with self._lock:
            if self._prediction.locked_at is not None:
                return
            try:
                self._prediction.enter(self.field.value)
            except ValueError as error:
                kept = self._prediction.text
                still = f" Your prediction is still {html.escape(kept)}." if kept else ""
                self._say(f"<strong>Not understood:</strong> {html.escape(str(error))}.{still}")

    def _begin_again(self, _button: Any) -> None:
        with self._lock:
            self._type("")
            self._prediction.again()

    def _type(self, text: str) -> None:
        """Change the text without taking it as an entry."""
        self.field.unobserve(self._enter, "value")
        self.field.value = text
        self.field.observe(self._enter, "value")

    def _say(self, text: str) -> None:
        # Without the line height, lines in a widget are as high as buttons.
        look = 'role="status" aria-live="polite" style="line-height: 1.4"'
        self.said.value = f"<div {look}>{text}</div>"


def _label(prediction: Any) -> str:
    unit = f" ({prediction.unit})" if prediction.unit else ""
    return f"{prediction.title}{unit}"


def _typed(prediction: Any) -> str:
    """The value as it may be typed, with all its digits."""
    if prediction.value is None:
        return ""
    return f"{repr(float(prediction.value)).removesuffix('.0')} {prediction.unit}".strip()
