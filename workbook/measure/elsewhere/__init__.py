"""The same training by labkit and by other frameworks, in one run: ``make elsewhere``.

``run`` trains with each in turns and makes the record; ``show`` has its table and figure;
``environments`` tells whether Horovod and TensorFlow are here. The scripts are in
notebooks/scripts/elsewhere.
"""

import lazy_loader

# Lazy: who reads the tables of a record needs no torch, and ranks need no figures.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "run": ["CONTENDERS", "run_elsewhere"],
        "show": ["elsewhere_figure", "elsewhere_table", "side_by_side"],
    },
)
