"""Answers to ``check.coordinator``."""

from collections import Counter, defaultdict

from graded import Answers
from ranks import travel_by_value

from workbook import check

travel_by_value(__name__)


def decide(cycles):
    waiting, decided = {}, []
    for announced in cycles:
        for rank, names in enumerate(announced):
            for name in names:
                waiting.setdefault(name, set()).add(rank)
        ready = [name for name, ranks in waiting.items() if len(ranks) == len(announced)]
        decided.append(ready)
        for name in ready:
            del waiting[name]
    return decided


def counts(cycles):
    """A rank announces a name once per turn, so that a count is enough; returns tuples."""
    count = Counter()
    for announced in cycles:
        count.update(name for names in announced for name in names)
        ready = tuple(name for name in count if count[name] == len(announced))
        for name in ready:
            del count[name]
        yield ready


def in_tuples(cycles):
    return tuple(counts(cycles))


def list_by_rank(cycles):
    """Of each rank the names that are left, and the order in which they were noted."""
    left, noted, decided = defaultdict(list), [], []
    for announced in cycles:
        for rank, names in enumerate(announced):
            left[rank] += names
            noted += [name for name in names if name not in noted]
        ready = [n for n in noted if all(n in left[rank] for rank in range(len(announced)))]
        noted = [name for name in noted if name not in ready]
        for rank in left:
            left[rank] = [name for name in left[rank] if name not in ready]
        decided.append(ready)
    return decided


def by_bits(cycles):
    """A bit per rank."""
    bits, decided = {}, []
    for announced in cycles:
        everyone = (1 << len(announced)) - 1
        for rank, names in enumerate(announced):
            bits |= {name: bits.get(name, 0) | 1 << rank for name in names}
        decided.append([name for name in bits if bits[name] == everyone])
        bits = {name: known for name, known in bits.items() if known != everyone}
    return decided


def one_after_the_other(cycles, waiting=None):
    """By recursion, on the list of (rank, name) that are noted."""
    if not cycles:
        return []
    (announced, *later), noted = cycles, list(waiting or [])
    noted += [(rank, name) for rank, names in enumerate(announced) for name in names]
    ranks = Counter(name for _, name in noted)
    ready = [name for name in ranks if ranks[name] == len(announced)]
    rest = [(rank, name) for rank, name in noted if name not in ready]
    return [ready, *one_after_the_other(later, rest)]


class Coordinator:
    def __init__(self, size):
        self.missing, self.size = {}, size

    def hears(self, rank, name):
        self.missing.setdefault(name, set(range(self.size))).discard(rank)

    def decides(self):
        ready = [name for name, ranks in self.missing.items() if not ranks]
        self.missing = {name: ranks for name, ranks in self.missing.items() if ranks}
        return ready


def with_a_class(cycles):
    coordinator, decided = Coordinator(len(cycles[0])), []
    for announced in cycles:
        for rank, names in enumerate(announced):
            for name in names:
                coordinator.hears(rank, name)
        decided.append(coordinator.decides())
    return decided


def most_ranks(cycles):
    waiting, decided = defaultdict(set), []
    for announced in cycles:
        for rank, names in enumerate(announced):
            for name in names:
                waiting[name].add(rank)
        decided.append([n for n, ranks in waiting.items() if 2 * len(ranks) > len(announced)])
        for name in decided[-1]:
            del waiting[name]
    return decided


def same_cycle(cycles):
    return [[n for n in one[0] if all(n in names for names in one)] for one in cycles]


def first_rank_decides(cycles):
    return [list(dict.fromkeys(name for names in one for name in names)) for one in cycles]


def never_forgets(cycles):
    waiting, decided = {}, []
    for announced in cycles:
        for rank, names in enumerate(announced):
            for name in names:
                waiting.setdefault(name, set()).add(rank)
        decided.append([n for n, ranks in waiting.items() if len(ranks) == len(announced)])
    return decided


def never_again(cycles):
    done, decided = set(), []
    for names in never_forgets(cycles):
        decided.append([name for name in names if name not in done])
        done.update(names)
    return decided


def alphabetical(cycles):
    return [sorted(names) for names in decide(cycles)]


def in_one_list(cycles):
    return [name for names in decide(cycles) for name in names]


def backwards(cycles):
    return [names[::-1] for names in decide(cycles)]


ANSWERS = [
    Answers(
        check.coordinator.decide,
        [decide, in_tuples, list_by_rank, by_bits, one_after_the_other, with_a_class],
        [
            (same_cycle, "coordinator.forgets"),
            (first_rank_decides, "coordinator.any_rank"),
            (most_ranks, "coordinator.majority"),
            (never_forgets, "coordinator.again"),
            (never_again, "coordinator.once"),
            (alphabetical, "coordinator.sorted"),
            (in_one_list, "coordinator.flat"),
            (backwards, "answer.wrong"),
            (lambda cycles: None, "answer.nothing"),
        ],
    ),
]
