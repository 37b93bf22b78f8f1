"""The check of page 16 that needs no ranks: what Horovod's coordinator decides in each cycle."""

import itertools
from collections.abc import Callable, Sequence

from workbook.exercises.grader import Verdict, answers

# Of each cycle, the names that each rank announces.
Cycles = Sequence[Sequence[Sequence[str]]]
# (cycles,): the names that all ranks carry out after each. In the last cases a name comes again,
# and ranks are far apart.
_DECIDED = [
    (([[["conv", "linear"], ["linear", "conv"]]],), [["conv", "linear"]]),
    (([[["linear"], ["conv"]], [["conv"], ["linear"]]],), [[], ["linear", "conv"]]),
    (([[["b"], []], [["a"], ["a"]], [[], ["b"]]],), [[], ["a"], ["b"]]),
    (([[["z", "a"]], [["m"]], [[]]],), [["z", "a"], ["m"], []]),
    (
        ([[["a"], ["a"], []], [["b"], [], ["b"]], [[], ["b"], ["a"]], [[], [], []]],),
        [[], [], ["a", "b"], []],
    ),
    (([[["a"], ["a"]], [["a"], []], [[], ["a"]]],), [["a"], [], ["a"]]),
    (
        (
            [
                [["b", "a"], ["a"], ["a", "b"], []],
                [[], ["b"], [], ["a"]],
                [["a"], ["a"], ["a"], ["b"]],
                [[], [], [], ["a"]],
            ],
        ),
        [[], ["a"], ["b"], ["a"]],
    ),
]


def decide(fn: Callable) -> Verdict:
    """Grade ``fn(cycles)``: the names that all ranks carry out after each cycle, in order.

    ``cycles[i][rank]`` are the names that a rank announces in cycle i. The turn of a name comes
    when all ranks have announced it, and it may be announced again after that. Those whose turn
    comes together go in the order in which they were noted. Runs in another process.
    """
    return answers(
        fn,
        _DECIDED,
        name="coordinator.decide",
        signature="cycles",
        mistakes={
            "coordinator.forgets": _of_one_cycle,
            "coordinator.any_rank": lambda cycles: _decide(cycles, enough=lambda size: 1),
            "coordinator.majority": lambda cycles: _decide(cycles, enough=lambda n: n // 2 + 1),
            "coordinator.again": lambda cycles: _decide(cycles, forget=False),
            "coordinator.once": _each_once,
            "coordinator.sorted": lambda cycles: [sorted(names) for names in _decide(cycles)],
            "coordinator.flat": lambda cycles: list(itertools.chain(*_decide(cycles))),
        },
    )


def _decide(
    cycles: Cycles, enough: Callable[[int], int] = lambda size: size, forget: bool = True
) -> list[list[str]]:
    """The right decisions, or those with a mistake.

    Args:
        enough: how many of so many ranks have to announce a name.
        forget: what was carried out is announced anew before its turn comes again.
    """
    noted, decided = dict[str, set[int]](), list[list[str]]()
    for announced in cycles:
        for rank, names in enumerate(announced):
            for name in names:
                noted.setdefault(name, set()).add(rank)
        ready = [name for name in noted if len(noted[name]) >= enough(len(announced))]
        decided.append(ready)
        for name in ready if forget else ():
            del noted[name]
    return decided


def _of_one_cycle(cycles: Cycles) -> list[list[str]]:
    """Only the names that all ranks announce in the same cycle."""
    return [names for cycle in cycles for names in _decide([cycle])]


def _each_once(cycles: Cycles) -> list[list[str]]:
    """As if no name came a second time."""
    done = set[str]()
    found = list[list[str]]()
    for names in _decide(cycles, forget=False):
        found.append([name for name in names if name not in done])
        done.update(names)
    return found
