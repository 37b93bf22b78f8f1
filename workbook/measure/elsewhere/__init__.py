"""The same training by labkit and by other frameworks, in one run: ``make elsewhere``.

``turns`` has a turn of labkit's techniques, and of a script in processes of its own; ``run`` who
takes turns, and the record; ``show`` its table and figure; ``environments`` whether Horovod and
TensorFlow are here. The scripts are in notebooks/scripts/elsewhere.
"""

import lazy_loader

# Lazy: who reads the tables of a record needs no torch, and ranks need no figures.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "environments": ["FRAMEWORKS", "python_of", "why_not"],
        "run": ["CONTENDERS", "run_elsewhere"],
        "show": ["elsewhere_figure", "elsewhere_table", "recorded", "side_by_side"],
    },
)
