"""Exercises graded on real processes, by what the ranks end with and by what they send.

The exercises are in ``workbook.exercises``, a module a topic. A check takes a learner's function
with the signature of its counterpart in labkit: ``check.ring.share_reduce(my_share_reduce)``.

An exercise of one's own is an ``Exercise`` for ``grade(fn, exercise)``.

Each check prints one table, returns it as a ``Verdict`` and never raises, so that a notebook
continues after an exercise that is not done yet.
"""

from workbook.exercises import (
    backend,
    cases,
    choosing,
    compressed,
    coordinator,
    data_parallel,
    ddp,
    detective,
    elsewhere,
    experts,
    failures,
    fairness,
    hops,
    hosts,
    mesh,
    messages,
    overlap,
    parameter_server,
    pipeline,
    placement,
    puzzles,
    rendezvous,
    ring,
    sharded,
    staleness,
    step,
    tensor_parallel,
)
from workbook.exercises.grader import Case, Exercise, Target, Verdict, grade

__all__ = ["Case", "Exercise", "Target", "Verdict", "grade"]
__all__ += ["backend", "cases", "choosing", "compressed", "coordinator"]
__all__ += ["data_parallel", "ddp", "detective", "elsewhere", "experts", "failures", "fairness"]
__all__ += [
    "hops",
    "hosts",
    "mesh",
    "messages",
    "overlap",
    "parameter_server",
    "pipeline",
    "placement",
]
__all__ += ["puzzles", "rendezvous", "ring", "sharded", "staleness", "step", "tensor_parallel"]
