"""Answers to ``check.detective``."""

from collections import Counter, defaultdict
from itertools import combinations

import numpy as np
import torch
from graded import Answers, a_stub
from ranks import travel_by_value

from workbook import check
from workbook.exercises.detective_run import HungRun

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


def as_a_list(dumps):
    found = by_number(dumps)
    return found and [*found]


def as_an_array(dumps):
    found = by_number(dumps)
    return None if found is None else np.array(found)


def as_a_tensor(*, dumps):
    found = by_number(dumps)
    return None if found is None else torch.tensor(found)


def with_sets(dumps):
    """Each rank's calls as a set: what a rank has alone, or all others have and it has not."""
    calls = {r: {(e["collective_seq_id"], *signature(e)) for e in dumps[r]} for r in dumps}
    start = max(min(number for number, *_ in own) for own in calls.values())
    odd = []
    for rank, own in calls.items():
        others = [calls[other] for other in calls if other != rank]
        alone = own - set.union(*others)
        lacks = set.intersection(*others) - own
        odd += [(number, rank) for number, *_ in alone | lacks if number >= start]
    return (min(odd)[1], min(odd)[0]) if odd else None


def by_pairs(dumps):
    """Each pair of ranks has a first difference; the culprit is in the earliest ones."""

    def first_difference(one, other):
        ours = {e["collective_seq_id"]: signature(e) for e in dumps[one]}
        theirs = {e["collective_seq_id"]: signature(e) for e in dumps[other]}
        begin = max(min(ours), min(theirs))
        numbers = sorted(n for n in ours.keys() | theirs.keys() if n >= begin)
        return next((n for n in numbers if ours.get(n) != theirs.get(n)), None)

    pairs = {pair: first_difference(*pair) for pair in combinations(sorted(dumps), 2)}
    numbers = [number for number in pairs.values() if number is not None]
    if not numbers:
        return None
    votes = Counter(r for pair, n in pairs.items() if n == min(numbers) for r in pair)
    return votes.most_common(1)[0][0], min(numbers)


def backwards(dumps):
    """From the newest number to the oldest: the last difference found is the first one."""
    table = defaultdict(dict)
    for rank, entries in dumps.items():
        for entry in reversed(entries):
            table[entry["collective_seq_id"]][rank] = signature(entry)
    start, found = max(entries[0]["collective_seq_id"] for entries in dumps.values()), None
    for number in sorted(table, reverse=True):
        row = [table[number].get(rank, "") for rank in dumps]
        if number >= start and len({*row}) > 1:
            found = [*dumps][next(i for i, what in enumerate(row) if row.count(what) == 1)], number
    return found


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


def reads_the_state(dumps):
    for rank in sorted(dumps):
        for entry in dumps[rank]:
            if entry["state"] != "completed":
                return rank, entry["collective_seq_id"]
    return None


def compares_the_last_numbers(dumps):
    last = {rank: dumps[rank][-1]["collective_seq_id"] for rank in sorted(dumps)}
    behind = min(last, key=last.get)
    return None if len({*last.values()}) == 1 else (behind, last[behind] + 1)


def trusts_the_first(called):
    first = called[min(called)]
    return next(rank for rank, what in called.items() if what != first)


def blames_who_lacks(called):
    lacking = [rank for rank, what in called.items() if what == "None"]
    return (
        lacking[0] if lacking else min(called, key=lambda r: [*called.values()].count(called[r]))
    )


def says_nobody(dumps):
    return None


def always_says_someone(dumps):
    return by_number(dumps) or (0, 1)


def says_a_rank_alone(dumps):
    found = by_number(dumps)
    return found and found[0]


def counts_the_entries(dumps):
    found = by_number(dumps)
    return found and (found[0], 1 + sum(e["retired"] for e in dumps[found[0]]) % 3)


def blames_the_next(dumps):
    found = by_number(dumps)
    return found and ((found[0] + 1) % 4, found[1])


# named(run, rank, host, line)

RUN = HungRun({}, {}, seed=5)
# Not the first rank of the second host, so that it differs from its number there.
RUN_ON_HOST_1 = next(run for seed in range(99) if (run := HungRun({}, {}, seed)).culprit == 3)


def named(answer):
    # Its stub is a call with the page's three None.
    given = () if answer is a_stub else answer()
    return check.detective.named(RUN_ON_HOST_1, *given)


def says(rank=None, host=None, line=None):
    def answer():
        right = RUN_ON_HOST_1
        given = (rank, right.culprit), (host, right.host), (line, right.line)
        return tuple(own if one is None else one for one, own in given)

    return answer


def right_numbers():
    return RUN_ON_HOST_1.culprit, RUN_ON_HOST_1.host, RUN_ON_HOST_1.line


def right_tensors():
    return tuple(map(torch.tensor, right_numbers()))


def right_numpy():
    return tuple(np.array(right_numbers()))


ANSWERS = [
    Answers(
        check.detective.culprit,
        [
            by_number,
            as_a_list,
            as_an_array,
            as_a_tensor,
            with_sets,
            by_pairs,
            backwards,
            variant(),
        ],
        [
            (blames_who_waits, "culprit.waits"),
            (reads_the_state, "culprit.state"),
            (compares_the_last_numbers, "culprit.last_numbers"),
            (variant(lambda entry: entry["profiling_name"]), "culprit.names_alone"),
            (variant(lambda entry: 1), "culprit.presence_alone"),
            (variant(lambda entry: entry["input_sizes"]), "culprit.sizes_alone"),
            (variant(by_place=True), "culprit.by_place"),
            (variant(who=trusts_the_first), "culprit.first_is_right"),
            (variant(who=blames_who_lacks), "culprit.lacks"),
            (variant(shift=-1), "culprit.last_in_common", "culprit.number"),
            (says_nobody, "culprit.missed"),
            (always_says_someone, "culprit.nobody"),
            (says_a_rank_alone, "culprit.kind"),
            (counts_the_entries, "culprit.number"),
            (blames_the_next, "culprit.rank", "case 1, the function blames rank"),
        ],
    ),
    Answers(
        named,
        [right_numbers, right_tensors, right_numpy],
        [
            (says(rank=4), "named.no_rank", "from 0 to 3"),
            (says(rank=1), "named.local_rank"),
            (says(rank=0), "named.waits"),
            (says(host=0), "named.host"),
            (says(host=2), "named.host"),
            (says(line=RUN.others_line), "named.others_line"),
            (says(line=RUN.cause_line), "named.cause"),
            (says(line=1), "named.line"),
        ],
    ),
]
