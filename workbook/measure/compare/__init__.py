"""``labkit compare``: our techniques and PyTorch's, under equal conditions, on this machine.

All contenders get the same model, data, global batch, order of samples, seed and number of steps,
use the same loop (``labkit.training.loop.fit``), and take turns. The result is one record, from
which all tables and figures are drawn, at once or later.

``measure`` chooses what runs and runs it, ``phases`` reads the traces; ``summary`` and ``figures``
show a record.
"""

import lazy_loader

# Lazy: what shows a record must not wait for all that makes one.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules={"figures", "summary"},
    submod_attrs={"command": ["main"], "measure": ["compare"], "summary": ["load"]},
)
