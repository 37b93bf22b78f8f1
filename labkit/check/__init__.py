"""Exercises graded on real processes, by what the ranks end with and by what they send.

``labkit.check`` is this package. The named checks take a learner's function with the signature of
its counterpart in ``labkit.collectives``:

    check.ring.rotate_and_add   .share_reduce   .share_only   .all_reduce
    check.naive.all_reduce    check.tree.all_reduce
    check.collectives.broadcast   .gather   .scatter   .reduce   .barrier
    check.one_device.accumulate   .loss_scaling   .top_k
    check.data_parallel.scatter   .replicate   .parallel_apply   .gather   .reduce
    check.ddp.average   .hooks   .buckets
    check.overlap.in_order   .finish   .backward
    check.parameter_server.server   .worker   .shards
    check.staleness.push   .server   .bookkeeping   .smaller_steps   .admission
    check.hops.forward   .backward
    check.placement.best_cuts
    check.pipeline.bubble   .one_f_one_b   .hop

Others belong to a page: ``check.fairness.replicas_agree`` and ``.interleaved_ratio``.

A page's own exercise, graded by what each rank returns, is ``returns(fn, expected, ...)``;
anything else is an ``Exercise`` for ``grade(fn, exercise)``. A function that needs no ranks is
graded with ``answers(fn, {arguments: result})``.

Each check prints one table, returns it as a ``Verdict`` and never raises, so that a notebook
continues after an exercise that is not done yet.
"""

from labkit.check import (
    collectives,
    data_parallel,
    ddp,
    fairness,
    hops,
    naive,
    one_device,
    overlap,
    parameter_server,
    pipeline,
    placement,
    ring,
    staleness,
    tree,
)
from labkit.check.grading import Case, Exercise, Target, Verdict, answers, grade, returns
from labkit.units import unknown_name

__all__ = ["Case", "Exercise", "Target", "Verdict", "answers", "grade", "returns"]
__all__ += ["collectives", "data_parallel", "ddp", "fairness", "hops", "naive", "one_device"]
__all__ += ["overlap", "parameter_server", "pipeline", "placement", "ring", "staleness", "tree"]

__getattr__ = unknown_name(__name__)
