"""``labkit compare``: our techniques and PyTorch's, under equal conditions, on this machine.

All contenders get the same model, data, global batch, order of samples, seed and number of steps,
use the same loop (``labkit.training.loop.fit``), and take turns. The result is one record, from
which all tables and figures are drawn, at once or later.

``contenders`` chooses what runs, ``measure`` runs it, ``phases`` reads the traces; ``summary`` and
``figures`` show a record, ``schema`` checks whether a file is a record.
"""

from labkit.bench.compare import figures, summary
from labkit.bench.compare.command import main
from labkit.bench.compare.measure import compare
from labkit.bench.compare.schema import load

__all__ = ["compare", "figures", "load", "main", "summary"]
