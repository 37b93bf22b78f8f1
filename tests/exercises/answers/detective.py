"""Answers to ``check.detective``."""

from collections import Counter

import numpy as np
from graded import Answers

from workbook import check
from workbook.exercises.detective import HungRun

# culprit(dumps)


def signature(entry):
    return entry["profiling_name"], str(entry["input_sizes"]), str(entry["input_dtypes"])


def by_number(dumps):
    """The rule, number by number, from the first that no rank has overwritten."""
    columns = {
        rank: {entry["collective_seq_id"]: signature(entry) for entry in entries}
        for rank, entries in dumps.items()
    }
    for number in range(max(map(min, columns.values())), max(map(max, columns.values())) + 1):
        called = {rank: column.get(number) for rank, column in columns.items()}
        counts = Counter(called.values())
        if len(counts) > 1:
            return min(called, key=lambda rank: counts[called[rank]]), number
    return None


def blames_who_waits(dumps):
    for rank in sorted(dumps):
        for entry in dumps[rank]:
            if not entry["retired"]:
                return rank, entry["collective_seq_id"]
    return None


# named(run, rank, host, line)

# Not the first rank of the second host, so that it differs from its number there.
RUN_ON_HOST_1 = next(run for seed in range(99) if (run := HungRun({}, {}, seed)).expected[0] == 3)


def named(answer):
    return check.detective.named(RUN_ON_HOST_1, *answer())


def says(**wrong):
    def answer():
        return tuple(
            (dict(zip(("rank", "host", "line"), RUN_ON_HOST_1.expected)) | wrong).values()
        )

    return answer


def right_numbers():
    return RUN_ON_HOST_1.expected


def right_numpy():
    return tuple(np.array(right_numbers()))


ANSWERS = [
    Answers(
        check.detective.culprit,
        [by_number],
        [blames_who_waits, lambda dumps: (found := by_number(dumps)) and (0, found[1])],
    ),
    Answers(named, [right_numpy], [says(rank=4), says(host=2), says(line=1)]),
]
