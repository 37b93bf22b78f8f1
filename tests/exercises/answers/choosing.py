"""Answers to ``check.choosing``."""

from graded import Answers

from labkit.costs.gpt_step import gpt_bytes, gpt_seconds, layouts
from workbook import check

# state_bytes(parameters, dp, tp, pp, stage)


def state(parameters, dp, tp, pp, stage):
    mine = parameters / tp / pp
    weights = 2 * mine / (dp if stage == 3 else 1)
    gradients = 2 * mine / (dp if stage >= 2 else 1)
    return weights + gradients + 12 * mine / (dp if stage >= 1 else 1)


def all_or_nothing(parameters, dp, tp, pp, stage):
    return 16 * parameters / tp / pp / (dp if stage else 1)


def without_its_replicas(parameters, dp, tp, pp, stage):
    return state(parameters, dp * tp * pp, 1, 1, stage)


# best_layout(model, batch, cluster)


def quickest(model, batch, cluster, fits=True):
    found = [
        (sum(gpt_seconds(model, batch, cluster, one).values()), number, one)
        for number, one in enumerate(layouts(model, batch, cluster))
        if not fits or sum(gpt_bytes(model, batch, cluster, one).values()) <= cluster.memory_bytes
    ]
    return min(found)[2]


def whatever_it_needs(model, batch, cluster):
    return quickest(model, batch, cluster, fits=False)


def the_first_that_fits(model, batch, cluster):
    for one in layouts(model, batch, cluster):
        if sum(gpt_bytes(model, batch, cluster, one).values()) <= cluster.memory_bytes:
            return one
    return None


ANSWERS = [
    Answers(check.choosing.state_bytes, [state], [all_or_nothing, without_its_replicas]),
    Answers(
        check.choosing.best_layout,
        [quickest],
        [whatever_it_needs, the_first_that_fits, lambda *case: "data parallel"],
    ),
]
