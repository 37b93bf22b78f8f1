"""Page 18: the decisions of Horovod's coordinator in each cycle; they need no ranks."""

from collections.abc import Sequence
from random import Random

from labkit.horovod.coordinator import Coordinator
from workbook.exercises.grader import solved


def _drawn(world_size: int, random: Random) -> list[list[list[str]]]:
    """Each rank announces all names, in its own order and cycles."""
    cycles = []
    for _ in range(4):
        cycles.append([[] for _ in range(world_size)])
    for rank in range(world_size):
        for name in random.sample("zamb", 4):
            random.choice(cycles)[rank].append(name)
    return cycles


# The names that each rank announces, by cycle. In the second case rank 0 has another order, and a
# name is left over; in the third a name comes again, and ranks are far apart; in the last one two
# names come again, in the other order.
@solved(
    ([[["conv", "linear"], ["linear", "conv"]]],),
    ([[["linear"], ["bias", "conv"]], [["conv", "bias"], ["linear"]], [[], ["conv"]]],),
    (
        [
            *([["b", "a"], ["a"], ["a", "b"], []], [[], ["b"], [], ["a"]]),
            *([["a"], ["a"], ["a"], ["b"]], [[], [], [], ["a"]]),
        ],
    ),
    ([[["a", "b"], ["a", "b"]], [["b", "a"], ["b", "a"]]],),
    more=lambda random: [(_drawn(world_size, random),) for world_size in (2, 3, 1, 2, 3, 4)],
    mistakes={
        "a rank may announce a name cycles before the others do": (
            lambda decide, cycles: [names for cycle in cycles for names in decide([cycle])]
        ),
    },
)
def decide(cycles: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Grade ``fn(cycles)``: the names that all ranks carry out after each cycle, in order.

    ``cycles[i][rank]`` are the names that a rank announces in cycle i. The turn of a name comes
    when all ranks have announced it, and it may be announced again after that. Those whose turn
    comes together go in the order in which they were noted.
    """
    coordinator = Coordinator(len(cycles[0]))
    decided = []
    for cycle in cycles:
        messages = []
        for names in cycle:
            messages.append({"new": dict.fromkeys(names, "allreduce"), "waits": False})
        decided.append(list(coordinator.decide(messages)))
    return decided
