"""Answers to ``check.cases.differing``; those to the cases are in ``test_cases``."""

from collections import Counter

from graded import Answers

from workbook import check


def by_counting(checksums):
    for step, now in enumerate(zip(*checksums.values())):
        seen = Counter(str(sorted(mine.items())) for mine in now)
        (common, count), *others = seen.most_common()
        if others:
            ranks = zip(checksums, now)
            left = [r for r, mine in ranks if count == 1 or str(sorted(mine.items())) != common]
            return step, sorted(left)
    return None


def takes_rank_0_to_be_right(checksums):
    for step, first in enumerate(checksums[0]):
        if others := [rank for rank in checksums if checksums[rank][step] != first]:
            return step, sorted(others)
    return None


def looks_at_the_last_step(checksums):
    step = len(checksums[0]) - 1
    return by_counting({rank: mine[-1:] for rank, mine in checksums.items()}) and (step, [0])


def one_parameter_only(checksums):
    return by_counting(
        {rank: [{"0.bias": one["0.bias"]} for one in mine] for rank, mine in checksums.items()}
    )


def none_is_right_if_no_two_agree(checksums):
    found = by_counting(checksums)
    return found and (found[0], found[1][1:] if len(found[1]) == len(checksums) else found[1])


WRONG = [takes_rank_0_to_be_right, looks_at_the_last_step, one_parameter_only]
WRONG += [none_is_right_if_no_two_agree]
ANSWERS = [Answers(check.cases.differing, [by_counting], WRONG)]
