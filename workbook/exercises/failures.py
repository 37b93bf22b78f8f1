"""Page 14: how often to write a checkpoint, and which replicas go on after a loss."""

from collections.abc import Collection, Mapping
from random import Random

from labkit.costs import checkpoint_interval_s
from workbook.exercises.grader import solved

# Replica -> (seconds at which it last answered, its step).
Answers = Mapping[int, tuple[float, int]]
Quorum = tuple[list[int], list[int]]


def _more_jobs(random: Random) -> list[tuple]:
    return [(random.uniform(5, 600), random.uniform(1e6, 1e9), 2 ** random.randint(1, 14))]


@solved(
    *((60.0, 1.8e8, 16384), (60.0, 1.8e8, 1024), (2.0, 5000.0, 1)),
    more=_more_jobs,
)
def interval(checkpoint_s: float, gpu_s: float, num_gpus: int) -> float:
    """Grade ``fn(checkpoint_s, gpu_s, num_gpus)``: seconds of training between checkpoints.

    Those that lose least, if one GPU fails every ``gpu_s`` seconds on average.
    """
    return checkpoint_interval_s(checkpoint_s, gpu_s / num_gpus)


def _form_quorum(
    answers: Answers,
    last: Collection[int],
    now_s: float,
    patience_s: float,
    min_replicas: int,
    *,
    counts_newcomers: bool = False,
    needs_voters: bool = False,
    asks_unhealthy: bool = False,
) -> Quorum:
    healthy = []
    for replica in sorted(answers):
        heard_s, _ = answers[replica]
        if now_s - heard_s <= patience_s:
            healthy.append(replica)
    voters = healthy
    if not counts_newcomers:
        voters = [replica for replica in healthy if replica in last]
    if last and 2 * len(voters) <= len(last):
        return [], []
    counted = healthy
    if needs_voters and last:
        counted = voters
    if not healthy or len(counted) < min_replicas:
        return [], []
    replicas_asked = answers if asks_unhealthy else healthy
    newest = max(answers[replica][1] for replica in replicas_asked)
    leading = [replica for replica in healthy if answers[replica][1] == newest]
    return leading, [replica for replica in healthy if replica not in leading]


def _more_answers(random: Random) -> list[tuple]:
    cases = []
    for count in (3, 4, 5):
        answers = {}
        for replica in range(count):
            # Never at the edge of what is healthy.
            answers[replica] = (random.choice((2.0, 7.0, 9.0, 9.5)), random.choice((40, 40, 32)))
        last = random.sample(range(count), count - 1)
        cases.append((answers, last, 10.0, 4.0, random.randint(1, 3)))
    return cases


# answers, last quorum, now, patience, min_replicas
@solved(
    ({0: (9.0, 40), 1: (9.5, 40), 2: (3.0, 40)}, [0, 1, 2], 10.0, 2.0, 2),
    ({0: (9.0, 40), 1: (9.5, 40), 2: (9.9, 0)}, [0, 1], 10.0, 2.0, 2),
    ({0: (9.0, 40), 1: (9.5, 40), 2: (3.0, 40), 3: (4.0, 40)}, [0, 1, 2, 3], 10.0, 2.0, 1),
    ({0: (9.0, 40), 1: (3.0, 40), 2: (1.0, 40), 3: (9.9, 0)}, [0, 1, 2], 10.0, 2.0, 1),
    ({0: (9.0, 40), 1: (9.5, 40), 2: (3.0, 40), 3: (1.0, 40)}, [0, 1, 2], 10.0, 2.0, 1),
    ({0: (9.0, 40), 1: (9.5, 40), 2: (3.0, 40)}, [0, 1, 2], 10.0, 2.0, 3),
    ({0: (9.0, 0), 1: (9.5, 0), 2: (9.9, 0)}, [], 10.0, 2.0, 2),
    ({0: (9.0, 38), 1: (9.5, 40), 2: (3.0, 41)}, [0, 1, 2], 10.0, 2.0, 2),
    ({0: (1.0, 40)}, [0], 10.0, 2.0, 1),
    ({0: (8.0, 40), 1: (9.5, 40), 2: (3.0, 40)}, [0, 1, 2], 10.0, 2.0, 2),
    ({0: (9.0, 40), 1: (9.5, 40), 2: (9.9, 40)}, [0, 1], 10.0, 2.0, 3),
    ({0: (3.0, 40), 1: (9.5, 40), 2: (9.9, 40)}, [0, 1], 10.0, 2.0, 1),
    more=_more_answers,
    mistakes={
        "a replica that was not in the last quorum joins this one, but has no vote": (
            lambda rule, *case: _form_quorum(*case, counts_newcomers=True)
        ),
        "newcomers count for min_replicas, which the whole quorum has to reach": (
            lambda rule, *case: _form_quorum(*case, needs_voters=True)
        ),
        "the newest step is that of the quorum: a replica that is not healthy leads nobody": (
            lambda rule, *case: _form_quorum(*case, asks_unhealthy=True)
        ),
    },
)
def quorum(
    answers: Answers,
    last: Collection[int],
    now_s: float,
    patience_s: float,
    min_replicas: int,
) -> Quorum:
    """Grade ``fn(answers, last, now_s, patience_s, min_replicas)``: (leading, recovering).

    ``answers`` holds by replica when it last answered, in seconds, and its step. Healthy are those
    that answered at most ``patience_s`` ago. They go on if more than half of the ``last`` quorum
    is healthy (of an empty one nothing is asked), and at least ``min_replicas`` are. Those with
    the newest step lead, and the others recover from them, both ascending. Two empty lists if
    none go on.
    """
    return _form_quorum(answers, last, now_s, patience_s, min_replicas)
