"""A backend of matplotlib for ranks: ``plt.show()`` displays the open figures and closes them."""

from typing import Any

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from labkit.runtime.displays import display


class FigureManager(FigureManagerBase):
    """Shows a figure in the launcher's cell."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Show and close all figures, in the order in which they were made."""
        try:
            for manager in sorted(Gcf.get_all_fig_managers(), key=_number):
                display(manager.canvas.figure)
        finally:
            Gcf.destroy_all()

    def show(self) -> None:
        display(self.canvas.figure)


def _number(manager: Any) -> int:
    return manager.num


class FigureCanvas(FigureCanvasAgg):
    """Draws to memory."""


# matplotlib's own class has a descriptor here, so type checkers refuse it in the class.
setattr(FigureCanvas, "manager_class", FigureManager)  # noqa: B010
