"""Rules that runs execute: which rank does what at which step. No torch, no processes.

    ring               ring all-reduce and its halves, on one host and over several
    tree               binomial trees, recursive doubling, pairwise exchange
    halving_doubling   reduce-scatter and all-gather in pairs, by halves of the tensor
    servers            which worker meets which server in which turn
    staleness          how late a gradient is, and may be
    bucket_assignment  which gradients DDP sends together (when: ``strategies.ddp``)
    split_points       where a list of layers is cut into stages
    pipeline           GPipe, 1F1B, zero-bubble, interleaved: what each stage runs
    timetable          when each action runs, and the messages in between
    sharding           when sharded parameters are gathered and freed, and gradients reduced
    learning_rate      the learning rate of each update: warm-up, then constant, step or cosine

Each schedule is written once: the real run executes it, the figures draw it, and the tests compare
it with the textbook.
"""

from labkit.schedules.pipeline import (
    PIPELINES as PIPELINES,
    Hop as Hop,
    gpipe as gpipe,
    interleaved as interleaved,
    one_by_one as one_by_one,
    one_f_one_b as one_f_one_b,
    with_hops as with_hops,
    zero_bubble as zero_bubble,
)
from labkit.schedules.ring import (
    chunk_bounds as chunk_bounds,
    ring_share_reduce as ring_share_reduce,
)
