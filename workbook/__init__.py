"""The course around labkit: it asks, checks, draws and measures what labkit runs."""

import lazy_loader

from labkit.engine.comm.source_lines import count_as_ours
from labkit.engine.runtime.preload import FOR_RANKS, IN_NOTEBOOKS, interrupts_later

# Lazy, as labkit is; the names are listed in __init__.pyi.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str):
    with interrupts_later():
        return _load(name)


count_as_ours(__file__)
IN_NOTEBOOKS.append("workbook.notebook.live")
# A notebook warms up before it imports the checks: otherwise each rank would import them again.
FOR_RANKS.append("workbook.check")
