"""The field in which a prediction is typed, in a notebook."""

import html
from typing import Any

import ipywidgets

_WRAP = {"flex_flow": "row wrap"}


class PredictionForm(ipywidgets.VBox):
    """A field with its quantity and unit, and below it what was entered, or the measurement.

    Attributes:
        field: the text; Enter or leaving the field confirms it.
        again: the button.
        said: what is known about the prediction, as HTML that screen readers read aloud.
    """

    def __init__(self, prediction: Any):
        self._prediction = prediction
        unit = f" ({prediction.unit})" if prediction.unit else ""
        self.field = ipywidgets.Text(
            description=f"Your prediction of {prediction.quantity}{unit}",
            placeholder="no prediction yet",
            continuous_update=False,
            style={"description_width": "initial"},
            # With a long quantity, the field stands below it.
            layout={"width": "auto", "height": "auto", "max_width": "100%", **_WRAP},
        )
        self.again = ipywidgets.Button(description="Predict again", layout={"width": "auto"})
        self.said = ipywidgets.HTML()
        # JupyterLab's look of tables, in the theme's colours.
        self.said.add_class("jp-RenderedHTMLCommon")
        row = ipywidgets.HBox([self.field, self.again], layout=_WRAP)
        super().__init__([row, self.said])
        self._show_value()
        self.refresh()
        self.field.observe(self._enter, "value")
        self.again.on_click(lambda _: prediction.again())

    def refresh(self) -> None:
        """Show the prediction as it is now."""
        prediction = self._prediction
        is_locked = prediction.locked_at is not None
        if is_locked or prediction.value is None:
            self._show_value()
        self.field.disabled = is_locked
        self.again.layout.display = None if is_locked else "none"
        if is_locked:
            table = prediction.row._repr_html_() if prediction.row else ""
            self._say(f"{table}<p>Locked since it was measured, {prediction.since}.</p>")
        else:
            text = f"<strong>{html.escape(prediction.text)}</strong>"
            entered = f"Your prediction: {text}." if prediction.text else "Type it, press Enter."
            self._say(f"{entered} It is locked when it is measured.")

    def _show_value(self) -> None:
        value, unit = self._prediction.value, self._prediction.unit
        self.field.value = "" if value is None else f"{value:.15g} {unit}".strip()

    def _enter(self, _change: Any) -> None:
        if self._prediction.locked_at is not None:
            return
        try:
            self._prediction.enter(self.field.value)
        except ValueError as error:
            kept = html.escape(self._prediction.text)
            still = f" Your prediction is still {kept}." if kept else ""
            self._say(f"<strong>Not understood:</strong> {html.escape(str(error))}.{still}")

    def _say(self, text: str) -> None:
        # Without the line height, lines in a widget are as high as buttons.
        look = 'role="status" aria-live="polite" style="line-height: 1.4"'
        self.said.value = f"<div {look}>{text}</div>"
