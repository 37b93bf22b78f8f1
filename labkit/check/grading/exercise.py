"""What a check sends through a learner's function, and what each call leaves behind.

An ``Exercise`` is the data that a function is graded by: ``inputs`` are its arguments on each
rank, ``cases`` the sizes and roots that are tried, ``call`` is how it is called. The rest judges.

Symbols: P ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.check.grading.words import Found, Mistake
from labkit.comm.comm import Comm
from labkit.costs.traffic import Cost
from labkit.units import format_count

# The first is divisible by 2, 3 and 4, and leaves enough numbers per chunk to tell what is in it.
SIZES = (96, 10, 2, 1, 0)


def random_tensor(seed: int, *shape: int) -> Tensor:
    """float32, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def with_parameters(layers: nn.Sequential, seed: int) -> nn.Sequential:
    """The same layers, with the same parameters each time."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in layers.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


class Target(NamedTuple):
    """What one rank may spend on one call; None is not looked at.

    ``operations`` counts the calls of send, recv and exchange; ``peers`` are the ranks it may send
    to.
    """

    messages: int | None = None
    num_bytes: int | None = None
    operations: int | None = None
    peers: frozenset[int] | None = None


@dataclass(frozen=True)
class Case:
    """One call of the learner's function: P, the elements of a rank's tensor, the root."""

    world_size: int
    size: int
    root: int = 0

    def tensor(self, rank: int) -> Tensor:
        """What ``rank`` starts with: float32 [size], random, the same each time."""
        return random_tensor(97 * rank + self.size + 1, self.size)

    def over_ranks(self, of: Callable[[int], Tensor]) -> Tensor:
        """The sum of ``of(rank)`` over the ranks."""
        return torch.stack([of(rank) for rank in range(self.world_size)]).sum(0)

    def total(self) -> Tensor:
        """The sum over the ranks, float32 [size], added up in float64."""
        return self.over_ranks(lambda rank: self.tensor(rank).double()).float()

    def target(self, cost_of: Callable[..., Cost], *which: int, peers: Iterable[int]) -> Target:
        """By a formula of ``labkit.costs.traffic``; ``which`` is the rank, and the root if any."""
        cost = cost_of(self.size, 4, self.world_size, *which)
        return Target(cost.messages, cost.num_bytes, cost.steps, frozenset(peers))


class Outcome(NamedTuple):
    """What one rank's call left behind.

    ``value`` is graded; ``stand_in`` is what the learner may have meant instead (a returned
    tensor, a list whose entries were replaced). ``bytes_to`` is by peer.
    """

    value: Any
    stand_in: Any
    messages: int
    num_bytes: int
    operations: int
    bytes_to: dict[int, int]


def one_tensor(rank: int, case: Case) -> tuple:
    """The usual arguments after ``comm``: one tensor, float32 [size]."""
    return (case.tensor(rank),)


def tensor_and_root(rank: int, case: Case) -> tuple:
    """The usual arguments of a collective with a root."""
    return case.tensor(rank), case.root


def no_arguments(rank: int, case: Case) -> tuple:
    """For functions whose arguments ``call`` makes on the rank."""
    return ()


def call_plainly(fn: Callable, comm: Comm, *args: Any) -> Any:
    """The usual way to call the learner's function."""
    return fn(comm, *args)


def nothing(rank: int, case: Case) -> Any:
    """What is expected where nothing is: None, or anything where a tensor is written in place."""
    return None


@dataclass(frozen=True)
class Exercise:
    """What a function has to do on P ranks.

    Attributes:
        name: how the verdict calls it.
        expected: (rank, case) -> what the rank must end with: a tensor, a number, or a list of
            them. None stands for "anything" where it is written in place, and in a list.
        inputs: (rank, case) -> the arguments after ``comm``, made on the rank.
        signature: the arguments in words, for the sentence about a wrong number of them.
        written: which argument after ``comm`` is written in place, and graded; None where what
            the function returns is graded.
        chunked: name the first wrong chunk: the tensor is thought of as P chunks.
        target: (rank, case) -> Target, of each rank.
        total: case -> Target of all ranks together (``operations`` of the busiest), for tasks
            that do not say which rank sends.
        same_bits: the ranks must agree to the bit.
        mistakes: a mistake's id (or a page's own sentence) -> (rank, case) -> the wrong value that
            it leads to. One that explains all ranks goes before one that explains the first wrong
            rank alone.
        judge: (case, values by rank) -> what is wrong, or None; used instead of ``expected``
            where the ranks must be looked at together.
        call: how the function is called on a rank. It returns what is graded, or a ``Mistake``
            that the rank has noticed itself.
        sizes: the elements of a rank's tensor, most telling first; () where there is no tensor
            whose size could change.
        rooted: what ``case.root`` is, in a word, if every rank takes its turn at it.
    """

    name: str
    expected: Callable[[int, Case], Any] = nothing
    inputs: Callable[[int, Case], tuple] = one_tensor
    signature: str = "comm, tensor"
    written: int | None = 0
    chunked: bool = False
    target: Callable[[int, Case], Target] | None = None
    total: Callable[[Case], Target] | None = None
    same_bits: bool = False
    mistakes: Mapping[str, Callable[[int, Case], Any]] = field(default_factory=dict)
    judge: Callable[[Case, list[Any]], Found] | None = None
    call: Callable[..., Any] = call_plainly
    sizes: tuple[int, ...] = SIZES
    rooted: str = ""

    def cases(self, world_size: int) -> list[Case]:
        """The calls to make on ``world_size`` ranks, all in one run."""
        sizes = self.sizes or (0,)
        others = range(1, world_size) if self.rooted else ()
        cases = [Case(world_size, size) for size in sizes]
        return cases + [Case(world_size, sizes[0], root) for root in others]

    def to_run(self) -> "Exercise":
        """Without what only judges: a page's own functions may hold what cannot travel."""
        parts = {"expected": nothing, "target": None, "total": None, "judge": None, "mistakes": {}}
        return replace(self, **parts)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        row: the row of the table.
        cell: what stands in it.
        mistake: what to tell about it; None where another row's mistake explains this one.
        named: whether a mistake is named, and not only the numbers.
    """

    row: str
    cell: str
    mistake: Mistake | None
    named: bool = True


def at_its_size(problem: Problem, case: Case, exercise: Exercise) -> Problem:
    """The cell names its size where that is not the one of the rest of the table."""
    if not exercise.sizes or case.size == exercise.sizes[0]:
        return problem
    return replace(problem, cell=f"{problem.cell} (at {case.size})")


def where(case: Case, exercise: Exercise) -> str:
    """``with 4 ranks and 10 elements``, and the root where there is one."""
    text = f"with {format_count(case.world_size, 'rank')}"
    if exercise.sizes:
        text += f" and {format_count(case.size, 'element')}"
    return text + (f", {exercise.rooted} {case.root}" if exercise.rooted else "")
