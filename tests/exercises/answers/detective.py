"""Answers to ``check.detective``."""

from collections import Counter

import numpy as np
from graded import Answers, a_stub
from ranks import travel_by_value

from workbook import check
from workbook.exercises.detective import HungRun

travel_by_value(__name__)


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


def all_of(entry):
    return [entry[key] for key in ("profiling_name", "input_sizes", "input_dtypes")]


def variant(what=all_of, by_place=False, who=None, shift=0):
    def fn(dumps):
        columns = {
            rank: {
                place if by_place else entry["collective_seq_id"]: what(entry)
                for place, entry in enumerate(entries, start=1)
            }
            for rank, entries in dumps.items()
        }
        begin, end = max(map(min, columns.values())), max(map(max, columns.values()))
        for number in range(begin, end + 1):
            called = {rank: str(columns[rank].get(number)) for rank in sorted(columns)}
            counts = Counter(called.values())
            if len(counts) > 1:
                rank = min(called, key=lambda r: counts[called[r]])
                return (who(called) if who else rank), number + shift
        return None

    return fn


def blames_who_waits(dumps):
    for rank in sorted(dumps):
        for entry in dumps[rank]:
            if not entry["retired"]:
                return rank, entry["collective_seq_id"]
    return None


def trusts_the_first(called):
    first = called[min(called)]
    return next(rank for rank, what in called.items() if what != first)


def blames_the_next(dumps):
    found = by_number(dumps)
    return found and ((found[0] + 1) % 4, found[1])


# named(run, rank, host, line)

# Not the first rank of the second host, so that it differs from its number there.
RUN_ON_HOST_1 = next(run for seed in range(99) if (run := HungRun({}, {}, seed)).due[0] == 3)


def named(answer):
    # Its stub is a call with the page's three None.
    given = () if answer is a_stub else answer()
    return check.detective.named(RUN_ON_HOST_1, *given)


def says(**wrong):
    def answer():
        return tuple((dict(zip(("rank", "host", "line"), RUN_ON_HOST_1.due)) | wrong).values())

    return answer


def right_numbers():
    return RUN_ON_HOST_1.due


def right_numpy():
    return tuple(np.array(right_numbers()))


ANSWERS = [
    Answers(
        check.detective.culprit,
        [by_number],
        [blames_who_waits, variant(who=trusts_the_first), blames_the_next],
    ),
    Answers(named, [right_numpy], [says(rank=4), says(host=2), says(line=1)]),
]
