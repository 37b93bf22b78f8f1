"""Answers to ``check.coordinator``."""

from graded import Answers

from workbook import check


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


def same_cycle(cycles):
    return [[n for n in one[0] if all(n in names for names in one)] for one in cycles]


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


def keeps_the_first_places(cycles):
    """A name that comes again goes where it went the first time."""
    names_in_order = []
    for cycle in cycles:
        for names in cycle:
            names_in_order += [name for name in names if name not in names_in_order]
    return [sorted(names, key=names_in_order.index) for names in with_a_class(cycles)]


ANSWERS = [
    Answers(
        check.coordinator.decide,
        [with_a_class],
        [same_cycle, never_again, keeps_the_first_places],
    )
]
