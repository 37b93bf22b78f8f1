"""The calls of a check: their arguments, what is expected, and what each call leaves behind.

Symbols: P ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random, SystemRandom
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.costs.traffic import Cost
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.units import format_count

# The first is divisible by 2, 3 and 4, with enough elements per chunk to tell what it contains.
SIZES = (96, 10, 2, 1, 0)
# One size of these is tried too, another in each check: a program made for SIZES is not enough.
_FURTHER_SIZES = range(11, 96)
# A seed and a key together fit into the 32 bits that PyTorch's generator uses.
_SEEDS, _KEYS = 2**15, 2**16
# Elements in a run that is drawn: 4 MB per rank, so that a transfer takes longer than its call.
DRAWN = 1_000_000


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


def new_seed() -> int:
    """The seed of the next check's data, another one each time."""
    return SystemRandom().randrange(_SEEDS)


class Target(NamedTuple):
    """The traffic that one rank may cause in one call, less is better; None is not judged."""

    messages: int | None = None
    num_bytes: int | None = None
    operations: int | None = None  # calls of send, recv and exchange
    peers: frozenset[int] | None = None  # to which it may send
    barriers: int | None = 0


@dataclass(frozen=True)
class Case:
    """One call of the learner's function, with data that differs from check to check."""

    world_size: int
    size: int  # the elements of a rank's tensor
    seed: int = 0
    call: int = 0  # 1 for the second call, which gets other data

    def tensor(self, rank: int) -> Tensor:
        """Return the tensor of ``rank``: float32 [size], random, always the same for one case."""
        values = self.random(97 * rank + self.size + 1, self.size)
        if self.size >= _FURTHER_SIZES.start:
            # A tiny number, which must not be dropped.
            values[2 * self.size // 3] *= 1e-6
        return values

    def random(self, key: int, *shape: int) -> Tensor:
        """A random tensor, float32, another one for each key (below 65536), seed and call."""
        return random_tensor((2 * self.seed + self.call) * _KEYS + key, *shape)

    def integer(self, key: int, least: int, most: int) -> int:
        """A random integer, ``most`` included, another one for each key, seed and call."""
        return Random((2 * self.seed + self.call) * _KEYS + key).randint(least, most)

    def over_ranks(self, summand: Callable[[int], Tensor]) -> Tensor:
        """The sum of ``summand(rank)`` over the ranks."""
        summands = list(map(summand, range(self.world_size)))
        return torch.stack(summands).sum(0)

    def total(self, ranks: Iterable[int] | None = None) -> Tensor:
        """The sum over some ranks, or all, float32 [size], added up in float64."""
        if ranks is None:
            ranks = range(self.world_size)
        total = torch.zeros(self.size, dtype=torch.float64)
        for rank in ranks:
            total += self.tensor(rank)
        return total.float()

    def target(self, cost_of: Callable[..., Cost], *ranks: int, peers: Iterable[int]) -> Target:
        """The target by a formula of ``labkit.costs.traffic``; ``ranks``: the rank, any root."""
        cost = cost_of(self.size, 4, self.world_size, *ranks)
        return Target(cost.messages, cost.num_bytes, cost.steps, frozenset(peers))


class Outcome(NamedTuple):
    """The result of one rank's call, and its traffic."""

    value: Any
    stand_in: Any  # what may be meant instead: a returned tensor, a list with other entries
    messages: int
    num_bytes: int
    operations: int
    bytes_to: dict[int, int]
    barriers: int = 0
    # The calls of comm: ("exchange", dst, src, bytes), ("send", dst, None, bytes), ....
    steps: tuple[tuple, ...] = ()
    changed: str = ""  # what the call has done to its arguments, in words


class Wrong(str):
    """A mistake in place of a value: a rank, or a ``call``, has noticed it itself.

    A sentence with numbers, and in a second line the mistake behind it, if it is known.
    """


class Problem(NamedTuple):
    """A mistake in an attempt, in sentences that begin with a small letter."""

    facts: str  # in which call, and what is there in place of what is expected
    cause: str = ""  # the mistake that makes it so
    hint: str = ""  # what may be the cause, where no other is found


# What a judge returns: the same, or None if nothing is wrong.
Found = str | None
Ranks = tuple[Outcome, ...]
Tried = Mapping[Case, Ranks]


def same_bits(case: Case, ranks: Ranks) -> Found:
    """A rule: all ranks end with the same bits."""
    for rank, outcome in enumerate(ranks):
        if not torch.equal(outcome.value, ranks[0].value):
            return (
                f"the sums on ranks 0 and {rank} differ in the last bits: the ranks add in "
                "different orders, so replicas would drift apart"
            )
    return None


@dataclass(frozen=True, eq=False)
class Exercise:
    """A task for a function on P ranks.

    Attributes:
        expected: (rank, case) -> what the rank must end with, a tensor, number or list; None is
            "anything" for a value written in place, and for an entry of a list.
        inputs: (rank, case) -> the arguments after ``comm``, made on the rank.
        signature: the names of all arguments, in one string.
        written: which argument after ``comm`` is written in place and graded; None: the result.
        keeps: the names of arguments whose values must stay as they are.
        chunked: judge the tensor as P chunks, and name the first wrong one.
        parts: case -> name -> what a wrong value may be made of; by default all ranks' tensors.
        mistakes: a sentence -> (rank, case) -> the wrong value it leads to.
        stuck: a pattern of what is said of a run that did not end -> the mistake behind it.
        judge: (case, values by rank) -> what is wrong, or None; in place of ``expected``.
        rule: (case, outcomes by rank) -> what is wrong although the values are right, or None.
        target: (rank, case) -> Target of this rank.
        more_cells: (the outcomes of right results, by case) -> further cells of the table, by row.
        call: (fn, comm, *inputs) -> what is graded, or a ``Wrong``.
        sizes: the numbers of elements to try, the most informative first; () for none.
        nouns: what there are ``world_size`` and ``size`` of; "" if it is not worth a word.
        special: case -> what is special about it, in words, or "".
        library: labkit's own function with the same arguments, shown beside the learner's run.
        drawn_size: the elements in that run; 0 for 4 MB, or for the first of unusual ``sizes``.
        link: over which that run goes.
    """

    name: str
    expected: Callable[[int, Case], Any] = lambda rank, case: None
    inputs: Callable[[int, Case], tuple] = lambda rank, case: (case.tensor(rank),)
    signature: str = "comm, tensor"
    written: int | None = 0
    keeps: tuple[str, ...] = ()
    chunked: bool = False
    parts: Callable[[Case], Mapping[str, Any]] | None = None
    mistakes: Mapping[str, Callable[[int, Case], Any]] = field(default_factory=dict)
    stuck: Mapping[str, str] = field(default_factory=dict)
    judge: Callable[[Case, list[Any]], Found] | None = None
    rule: Callable[[Case, Ranks], Found] = lambda case, ranks: None
    target: Callable[[int, Case], Target] | None = None
    more_cells: Callable[[Mapping[Case, Ranks]], dict[str, str]] = lambda tried: {}
    call: Callable[..., Any] = lambda fn, comm, *args: fn(comm, *args)
    sizes: tuple[int, ...] = SIZES
    nouns: tuple[str, str] = ("rank", "element")
    special: Callable[[Case], str] = lambda case: ""
    library: Callable | None = None
    drawn_size: int = 0
    link: EmulatedLink | None = None

    def cases(self, world_size: int, seed: int = 0) -> list[Case]:
        """The calls to make on ``world_size`` ranks, all in one run: two of each kind in a row."""
        sizes = list(self.sizes or (0,))
        if self._usual_sizes:
            sizes.append(Random(seed).choice(_FURTHER_SIZES))
        return [Case(world_size, size, seed, call) for size in sizes for call in (0, 1)]

    def drawn_case(self, world_size: int) -> Case:
        """The call whose run is drawn."""
        size = self.drawn_size
        if not size and self._usual_sizes:
            size = DRAWN
        elif not size and self.sizes:
            size = self.sizes[0]
        return Case(world_size, size)

    @property
    def _usual_sizes(self) -> bool:
        return self.sizes[: len(SIZES)] == SIZES

    def to_run(self) -> "Exercise":
        """The same without its judging fields, whose functions may not be picklable."""
        judging = ("expected", "target", "judge", "parts", "library", "special", "rule")
        judging += ("more_cells",)
        return replace(self, mistakes={}, **dict.fromkeys(judging))

    def where(self, case: Case) -> str:
        """The case in words: ``with 4 ranks and 10 elements``, and what is special about it."""
        ranks, elements = self.nouns
        counts = ""
        if ranks:
            counts += f"with {format_count(case.world_size, ranks)}"
        if self.sizes and elements:
            counts += f" and {format_count(case.size, elements)}"
        return ", ".join(filter(None, [counts, self.special(case)])) or "here"
