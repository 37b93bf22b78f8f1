"""``labkit bench elsewhere``: the same training by labkit and by other frameworks, in one run.

    digits        the experiment as a file, and the scripts that read it
    environments  whether Horovod and TensorFlow are here
    contenders    who trains
    own, scripts  a turn of labkit's techniques, and of a script in processes of its own
    turn          what a turn has found, and how a failure is told
    measure       the turns; result: what they found, and its record
    recorded      the stored record
    table         the tables of a record; figure: its figure

The scripts are in ``notebooks/scripts/elsewhere``; ``make elsewhere`` records a run of all.
"""

import lazy_loader

# Lazy: who reads the tables of a record needs no torch, and ranks need no figures.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "contenders": ["CONTENDERS"],
        "environments": ["FRAMEWORKS", "python_of", "why_not"],
        "figure": ["elsewhere_figure"],
        "measure": ["bench_elsewhere", "run_elsewhere"],
        "recorded": ["recorded", "side_by_side"],
        "table": ["elsewhere_table", "losses_table"],
    },
)
