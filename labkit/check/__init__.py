"""Exercises graded on real processes, by what the ranks end with and by what they send.

``labkit.check`` is this package. The named checks take a learner's function with the signature of
its counterpart in ``labkit.collectives``:

    check.ring.rotate_and_add   .share_reduce   .share_only   .all_reduce
    check.naive.all_reduce    check.tree.all_reduce
    check.collectives.broadcast   .gather   .scatter   .reduce   .barrier
    check.step.timer   .flops   .largest_batch   .accumulate   .loss_scaling
    check.one_device.loss_scaling   .top_k
    check.data_parallel.scatter   .parallel_apply   .reduce
    check.ddp.buckets   .sampler   .average   .accumulate
    check.parameter_server.server   .worker   .shards
    check.staleness.bookkeeping   .admission   .server
    check.hops.forward   .backward
    check.placement.best_cuts
    check.pipeline.bubble   .one_f_one_b   .hop
    check.puzzles.largest   .pass_on   .pass_in_place   .same_bits   .broadcast   .prefix_sum
        .all_gather   .long_broadcast   .reduce_blocks   .all_reduce

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
    parameter_server,
    pipeline,
    placement,
    puzzles,
    ring,
    staleness,
    step,
    tree,
)
from labkit.check.grading import Case, Exercise, Target, Verdict, answers, grade, returns
from labkit.units import unknown_name

__all__ = ["Case", "Exercise", "Target", "Verdict", "answers", "grade", "returns"]
__all__ += ["collectives", "data_parallel", "ddp", "fairness", "hops", "naive", "one_device"]
__all__ += ["parameter_server", "pipeline", "placement", "puzzles", "ring", "staleness", "step"]
__all__ += ["tree"]

__getattr__ = unknown_name(__name__)
