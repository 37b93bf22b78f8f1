"""The field in which a prediction is typed, in a notebook."""

import html
from typing import Any

import anywidget
import ipywidgets

_WRAP = {"flex_flow": "row wrap"}


class _GoOn(anywidget.AnyWidget):
    """After Enter in the field, the next cell is selected: Shift+Enter runs it."""

    _esm = """
    export default {
      render({ el }) {
        const goOn = (event) => {
          if (event.key !== "Enter" || !el.parentElement?.contains(event.target)) return;
          if (!event.target.matches("input")) return;
          event.preventDefault();
          event.target.blur();
          el.closest(".jp-Cell")?.nextElementSibling?.focus();
        };
        document.addEventListener("keydown", goOn, true);
        return () => document.removeEventListener("keydown", goOn, true);
      },
    };
    """


class PredictionForm(ipywidgets.VBox):
    """A field until the measurement, and then a button to predict again."""

    def __init__(self, prediction: Any):
        self._prediction = prediction
        description = f"Your prediction of {prediction.quantity}"
        if prediction.unit:
            description += f" ({prediction.unit})"
        self.field = ipywidgets.Text(
            prediction.text,
            description=description,
            placeholder="no prediction yet",
            continuous_update=False,
            style={"description_width": "initial"},
            # With a long quantity, the field stands below it.
            layout={"width": "auto", "height": "auto", "max_width": "100%", **_WRAP},
        )
        self.again = ipywidgets.Button(description="Predict again", layout={"width": "auto"})
        self.status = ipywidgets.HTML()
        below = ipywidgets.HBox([self.status, self.again], layout=_WRAP)
        super().__init__([self.field, below, _GoOn()])
        self.refresh()
        self.field.observe(self._enter, "value")
        self.again.on_click(lambda _: prediction.again())

    def refresh(self, problem: str = "") -> None:
        """Show the prediction as it is now."""
        prediction = self._prediction
        is_locked = prediction.locked_at is not None
        self.field.layout.display = "none" if is_locked else None
        self.again.layout.display = None if is_locked else "none"
        words = ""
        if prediction.text:
            words = f"Your prediction: {prediction.text}."
        if is_locked:
            words = repr(prediction).partition(";")[0]
        elif not problem:
            words = f"{words or 'Type it, press Enter.'} It is locked when it is measured."
        words = html.escape(words)
        if problem:
            words = f"<strong>Not understood:</strong> {html.escape(problem)}. {words}"
        # Without the line height, lines in a widget are as high as buttons.
        look = 'role="status" aria-live="polite" style="line-height: 1.4"'
        self.status.value = f"<div {look}>{words}</div>"

    def _enter(self, _change: Any) -> None:
        try:
            self._prediction.enter(self.field.value)
        except ValueError as error:
            self.refresh(str(error))
