"""What a check calls a learner's function with, and what each call leaves behind.

An ``Exercise`` is the data by which a function is graded: ``inputs`` are its arguments on each
rank, ``cases`` the sizes and roots that are tried, ``call`` is how it is called. The other fields
judge the outcome.

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
from labkit.units import format_count, spelled

# The first is divisible by 2, 3 and 4, with enough elements per chunk to tell what it contains.
SIZES = (96, 10, 2, 1, 0)


def random_tensor(seed: int, *shape: int) -> Tensor:
    """A random tensor, float32, always the same for the same seed and shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def with_parameters(layers: nn.Sequential, seed: int) -> nn.Sequential:
    """Fill the layers with random parameters, always the same for the same seed; return them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in layers.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


class Target(NamedTuple):
    """The traffic that one rank may cause in one call; a field of None is not judged.

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
        """What ``rank`` starts with: float32 [size], random, always the same for one case."""
        return random_tensor(97 * rank + self.size + 1, self.size)

    def over_ranks(self, of: Callable[[int], Tensor]) -> Tensor:
        """The sum of ``of(rank)`` over the ranks."""
        return torch.stack([of(rank) for rank in range(self.world_size)]).sum(0)

    def total(self) -> Tensor:
        """The sum over the ranks, float32 [size], added up in float64."""
        return self.over_ranks(lambda rank: self.tensor(rank).double()).float()

    def target(self, cost_of: Callable[..., Cost], *which: int, peers: Iterable[int]) -> Target:
        """The target by a formula of ``labkit.costs.traffic``; ``which``: the rank, any root."""
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
    """No arguments after ``comm``: for exercises whose ``call`` makes them on the rank."""
    return ()


def call_plainly(fn: Callable, comm: Comm, *args: Any) -> Any:
    """The usual way to call the learner's function."""
    return fn(comm, *args)


def nothing(rank: int, case: Case) -> Any:
    """Expect None, or anything if a tensor is written in place."""
    return None


@dataclass(frozen=True)
class Exercise:
    """What a function has to do on P ranks.

    Attributes:
        name: its name in the verdict.
        expected: (rank, case) -> what the rank must end with: a tensor, a number, or a list of
            them. None means "anything" for a value written in place, and for an entry of a list.
        inputs: (rank, case) -> the arguments after ``comm``, made on the rank.
        signature: the names of all arguments, in one string.
        written: the position of the argument after ``comm`` that is written in place and graded;
            None if the returned value is graded.
        chunked: judge the tensor as P chunks, and name the first wrong one.
        target: (rank, case) -> Target of this rank.
        total: case -> Target of all ranks together (``operations`` of the busiest rank), for
            exercises that do not prescribe which rank sends.
        same_bits: the ranks must agree to the bit.
        mistakes: a mistake's id (or a page's own sentence) -> (rank, case) -> the wrong value that
            it leads to. A mistake that explains all ranks is preferred to a mistake that explains
            only the first wrong rank.
        judge: (case, values by rank) -> what is wrong, or None; used instead of ``expected``
            where the ranks must be judged together.
        call: (fn, comm, *inputs) -> what is graded, or a ``Mistake`` that the rank has noticed
            itself.
        sizes: the numbers of elements to try in a rank's tensor, the most informative first; ()
            if the exercise has no tensor of variable size.
        rooted: the word for ``case.root`` in a sentence, if each rank is tried as root; else "".
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
        """The same without its judging fields, whose functions may not be picklable."""
        parts = {"expected": nothing, "target": None, "total": None, "judge": None, "mistakes": {}}
        return replace(self, **parts)


Exercise.__init__ = spelled(Exercise.__init__)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        row: the row of the table.
        cell: the text of its cell.
        mistake: what to tell about it; None if another row's mistake explains this one.
        named: whether the mistake has a name, not only numbers.
    """

    row: str
    cell: str
    mistake: Mistake | None
    named: bool = True


def at_its_size(problem: Problem, case: Case, exercise: Exercise) -> Problem:
    """Add the size to the problem's cell, if the rest of the table is for another size."""
    if not exercise.sizes or case.size == exercise.sizes[0]:
        return problem
    return replace(problem, cell=f"{problem.cell} (at {case.size})")


def where(case: Case, exercise: Exercise) -> str:
    """The case in words: ``with 4 ranks and 10 elements``, and the root if there is one."""
    text = f"with {format_count(case.world_size, 'rank')}"
    if exercise.sizes:
        text += f" and {format_count(case.size, 'element')}"
    return text + (f", {exercise.rooted} {case.root}" if exercise.rooted else "")
