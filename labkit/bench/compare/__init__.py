"""``labkit compare``: all techniques and PyTorch's own, like for like, on this machine.

All contenders get the same model, data, global batch, order of samples, seed and number of steps,
on the same loop (``labkit.training.loop.fit``), and they take turns. The result is one record,
from which all tables and figures are drawn, now or later.

``contenders`` says what runs, ``measure`` runs it, ``phases`` reads the traces;
``summary`` and ``figures`` say what a record shows, ``schema`` whether a file is one.
"""

from labkit.bench.compare import figures, summary
from labkit.bench.compare.command import main
from labkit.bench.compare.measure import compare
from labkit.bench.compare.schema import load

__all__ = ["compare", "figures", "load", "main", "summary"]
