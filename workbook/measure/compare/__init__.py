"""``labkit compare``: our techniques and PyTorch's, under equal conditions, on this machine.

All contenders get the same model, data, global batch, order of samples, seed and number of
steps, use the same loop (``labkit.training.loop.fit``), and take turns. ``measure`` makes one
record, from which ``summary`` and ``figures`` draw all tables and figures, at once or later.
"""

import lazy_loader

# Lazy: what shows a record must not wait for all that makes one.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules={"figures", "summary"},
    submod_attrs={"measure": ["compare", "main"], "summary": ["load"]},
)
