"""Exercises graded on real processes, by what the ranks end with and by what they send.

The exercises are in ``workbook.exercises``. The named checks take a learner's function with the
signature of its counterpart in ``labkit.collectives``:

    check.messages.there_and_back   .round_trip   .all_gather   .message_time
    check.ring.rotate_and_add   .share_reduce   .share_only   .all_reduce   .weighted_mean
    check.tree.choose
    check.collectives.gather
    check.step.timer   .flops   .largest_batch   .accumulate   .loss_scaling
    check.backend.bucket   .work   .group
    check.compressed.half_the_bytes   .top_k
    check.data_parallel.scatter   .replicate   .parallel_apply   .gather   .reduce
    check.ddp.average   .hooks   .buckets
    check.overlap.in_order   .finish   .backward
    check.parameter_server.push_and_pull   .one_by_one   .server   .worker   .shards
    check.staleness.push   .server   .bookkeeping   .smaller_steps   .admission
    check.hops.forward   .backward
    check.placement.bytes_over_cuts   .step_seconds   .best_cuts
    check.pipeline.micro_batches   .gpipe   .bubble   .one_f_one_b   .hop   .step
    check.rendezvous.meet
    check.hosts.inside   .between   .all_reduce   .place
    check.detective.culprit
    check.elsewhere.to_ddp   .to_horovod   .semantics
    check.coordinator.decide
    check.puzzles.largest   .pass_on   .pass_in_place   .same_bits   .broadcast   .prefix_sum
        .all_gather   .long_broadcast   .reduce_blocks   .all_reduce

Others belong to a page: ``check.fairness.synchronisations``, ``.interleaved_ratio``,
``.useful_rate`` and ``.replicas_agree``; ``check.detective.named``.

A page's own exercise, graded by what each rank returns, is ``returns(fn, expected, ...)``;
anything else is an ``Exercise`` for ``grade(fn, exercise)``. A function that needs no ranks is
graded with ``answers(fn, {arguments: result})``.

Each check prints one table, returns it as a ``Verdict`` and never raises, so that a notebook
continues after an exercise that is not done yet.
"""

from workbook.exercises import (
    backend,
    collectives,
    compressed,
    coordinator,
    data_parallel,
    ddp,
    detective,
    elsewhere,
    fairness,
    hops,
    hosts,
    messages,
    overlap,
    parameter_server,
    pipeline,
    placement,
    puzzles,
    rendezvous,
    ring,
    staleness,
    step,
    tree,
)
from workbook.exercises.grader import Case, Exercise, Target, Verdict, answers, grade, returns

__all__ = ["Case", "Exercise", "Target", "Verdict", "answers", "grade", "returns"]
__all__ += ["backend", "collectives", "compressed", "coordinator", "data_parallel", "ddp"]
__all__ += ["detective", "elsewhere", "fairness", "hops", "hosts", "messages", "overlap"]
__all__ += ["parameter_server", "pipeline", "placement", "puzzles", "rendezvous", "ring"]
__all__ += ["staleness", "step", "tree"]
