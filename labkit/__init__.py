"""labkit: distributed deep-learning training, from scratch, on real processes."""

import lazy_loader

from labkit.backend import register_backend
from labkit.engine.runtime.preload import FOR_RANKS, FOR_TRAINING, interrupts_later

__version__ = "0.2.0"

# Lazy: a notebook's first cell should not wait for parts that it does not use. The names are
# listed in __init__.pyi, which editors read, too.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str):
    with interrupts_later():
        return _load(name)


register_backend()
# The ranks of a script load that script, and so import the launcher.
FOR_RANKS += ["labkit.collectives", "labkit.engine.runtime.launch"]
FOR_TRAINING.append("labkit.training.loop")
