"""Page 14: how often to write a checkpoint."""

import math
from random import Random

from labkit.costs import checkpoint_interval_s
from workbook.exercises.grader import solved


def _more_jobs(random: Random) -> list[tuple]:
    return [(random.uniform(5, 600), random.uniform(1e6, 1e9), 2 ** random.randint(1, 14))]


@solved(
    *((60.0, 1.8e8, 16384), (60.0, 1.8e8, 1024), (2.0, 5000.0, 1)),
    more=_more_jobs,
    mistakes={
        "the factor 2 is missing: a failure loses half an interval on average, not all of it": (
            lambda rule, checkpoint_s, gpu_s, num_gpus: math.sqrt(checkpoint_s * gpu_s / num_gpus)
        ),
    },
)
def interval(checkpoint_s: float, gpu_s: float, num_gpus: int) -> float:
    """Grade ``fn(checkpoint_s, gpu_s, num_gpus)``: seconds of training between checkpoints.

    Those that lose least, if one GPU fails every ``gpu_s`` seconds on average.
    """
    return checkpoint_interval_s(checkpoint_s, gpu_s / num_gpus)
