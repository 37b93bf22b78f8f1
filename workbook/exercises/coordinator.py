"""Page 16: what Horovod's coordinator decides in each cycle; it needs no ranks."""

from collections.abc import Callable, Sequence
from functools import partial

from workbook.exercises.grader import Verdict, answers

# The names that each rank announces, by cycle. In the last cases a name comes again, and ranks are
# far apart.
_CYCLES: list[list[list[list[str]]]] = [
    [[["conv", "linear"], ["linear", "conv"]]],
    [[["linear"], ["conv"]], [["conv"], ["linear"]]],
    [[["b"], []], [["a"], ["a"]], [[], ["b"]]],
    [[["z", "a"]], [["m"]], [[]]],
    [[["a"], ["a"], []], [["b"], [], ["b"]], [[], ["b"], ["a"]], [[], [], []]],
    [[["a"], ["a"]], [["a"], []], [[], ["a"]]],
    [
        [["b", "a"], ["a"], ["a", "b"], []],
        [[], ["b"], [], ["a"]],
        [["a"], ["a"], ["a"], ["b"]],
        [[], [], [], ["a"]],
    ],
]


def decide(fn: Callable) -> Verdict:
    """Grade ``fn(cycles)``: the names that all ranks carry out after each cycle, in order.

    ``cycles[i][rank]`` are the names that a rank announces in cycle i. The turn of a name comes
    when all ranks have announced it, and it may be announced again after that. Those whose turn
    comes together go in the order in which they were noted. Runs in another process.
    """
    return answers(
        fn,
        [((cycles,), _decide(cycles)) for cycles in _CYCLES],
        name="coordinator.decide",
        signature="cycles",
        mistakes={
            "a rank may announce a name cycles before the others do": (
                lambda cycles: [names for cycle in cycles for names in _decide([cycle])]
            ),
            "what was carried out has to be announced anew": partial(_decide, forgets=False),
            "the order is that in which the names were noted, not the alphabet's": (
                lambda cycles: [sorted(names) for names in _decide(cycles)]
            ),
        },
    )


def _decide(cycles: Sequence[Sequence[Sequence[str]]], forgets: bool = True) -> list[list[str]]:
    noted, decided = dict[str, set[int]](), list[list[str]]()
    for announced in cycles:
        for rank, names in enumerate(announced):
            for name in names:
                noted.setdefault(name, set()).add(rank)
        ready = [name for name in noted if len(noted[name]) == len(announced)]
        decided.append(ready)
        for name in ready if forgets else ():
            del noted[name]
    return decided
