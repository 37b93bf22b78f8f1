"""Formulas: what each collective and technique sends, and how long it takes.

    traffic            steps, messages and bytes, exactly as a run counts them
    link               seconds: the alpha-beta model, fitted to measurements; all-reduces, servers
    ddp_step           a step of DDP: which bucket is sent when, and what stays exposed
    pipeline_timeline  a step of a pipeline: which stage runs what when, the bubble, hidden hops
    hidden             from how many tokens on communication is no longer than computing
    memory             what a rank holds, by what it is for
    async_run          an asynchronous parameter server: staleness, waiting time
    failures           the checkpoint interval that loses least, and goodput
    planner            what a split into stages costs, and the best one; layers as data
    layer_profile      the cost of each layer: measured seconds, or its counted FLOPs
    what_if            a recorded run under other conditions: its trace is played again (replay)

They are compared with measurements, so nothing that counts during a run imports them.
"""

from labkit.costs.ddp_step import (
    predict_step as predict_step,
    samples_that_hide as samples_that_hide,
)
from labkit.costs.failures import (
    checkpoint_interval_s as checkpoint_interval_s,
    goodput as goodput,
)
from labkit.costs.hidden import tokens_that_hide as tokens_that_hide
from labkit.costs.link import (
    Link as Link,
    all_reduce_seconds as all_reduce_seconds,
    crossover_bytes as crossover_bytes,
    hosts_all_reduce_seconds as hosts_all_reduce_seconds,
    parameter_server_seconds as parameter_server_seconds,
)
from labkit.costs.pipeline_timeline import (
    bubble as bubble,
    bubble_formula as bubble_formula,
    micro_batches_for_bubble as micro_batches_for_bubble,
    predicted_slots as predicted_slots,
    samples_that_hide_hop as samples_that_hide_hop,
)
from labkit.costs.planner import (
    VGG16_SPLITS as VGG16_SPLITS,
    best_split as best_split,
    predict_split as predict_split,
)
from labkit.costs.traffic import (
    Cost as Cost,
    card_bytes as card_bytes,
    data_parallel_cost as data_parallel_cost,
    halving_doubling_cost as halving_doubling_cost,
    model_parallel_cost as model_parallel_cost,
    naive_all_reduce_cost as naive_all_reduce_cost,
    parameter_server_cost as parameter_server_cost,
    ring_all_reduce_cost as ring_all_reduce_cost,
)
