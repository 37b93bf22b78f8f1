"""Answers to ``check.detective``."""

from collections import Counter

import numpy as np
from graded import Answers

from workbook import check
from workbook.exercises.detective import case_of_run

# culprit(dumps)


def signature(entry):
    return entry["profiling_name"], str(entry["input_sizes"]), str(entry["input_dtypes"])


def by_number(dumps, compared=signature, skipped=0):
    """The rule, number by number, from the first that no rank has overwritten."""
    columns = {
        rank: {entry["collective_seq_id"]: compared(entry) for entry in entries}
        for rank, entries in dumps.items()
    }
    first = max(map(min, columns.values())) + skipped
    for number in range(first, max(map(max, columns.values())) + 1):
        called = {rank: column.get(number) for rank, column in columns.items()}
        counts = Counter(called.values())
        if len(counts) > 1:
            return min(called, key=lambda rank: counts[called[rank]]), number
    return None


def compares_states(dumps):
    """Some ranks have retired an entry that others have not, without any fault."""
    return by_number(dumps, compared=lambda entry: (*signature(entry), entry["retired"]))


def skips_the_first(dumps):
    return by_number(dumps, skipped=1)


def blames_who_waits(dumps):
    for rank in sorted(dumps):
        for entry in dumps[rank]:
            if not entry["retired"]:
                return rank, entry["collective_seq_id"]
    return None


# named(case, rank=..., host=..., line=..., cause=...)

WAITS = {"collective_seq_id": 5, "profiling_name": "gloo:all_reduce", "input_sizes": [[1000]]}
# Of two agents, as torchrun names the first failure on each host.
ROOT = "Root Cause (first observed failure):"
ERRORS = [(0, ROOT), (0, "  rank      : 1 (local_rank: 1)")]
ERRORS = [(1, ROOT), (1, "  rank      : 2 (local_rank: 0)"), *ERRORS]


def hung(seed, stacks=None):
    """A run that stood still, with stacks and dumps of all ranks."""
    stacks = stacks or dict.fromkeys(range(4), "")
    return case_of_run(seed, stacks, {rank: [WAITS] for rank in range(4)}, ERRORS)


# Not the first rank of the second host, so that it differs from its number there.
ON_HOST_1 = next(case for seed in range(99) if (case := hung(seed)).answer["rank"] == 3)


def named(answer):
    return check.detective.named(ON_HOST_1, **answer())


def says(**wrong):
    return lambda: ON_HOST_1.answer | wrong


def right_numpy():
    return {n: np.array(one) if n != "cause" else one for n, one in ON_HOST_1.answer.items()}


ANSWERS = [
    Answers(
        check.detective.culprit,
        [by_number],
        [
            blames_who_waits,
            compares_states,
            skips_the_first,
            lambda dumps: (found := by_number(dumps)) and (0, found[1]),
        ],
    ),
    Answers(named, [right_numpy], [says(rank=4), says(rank=0), says(host=2), says(line=1)]),
]
