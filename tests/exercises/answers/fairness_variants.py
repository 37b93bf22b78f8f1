"""More answers to ``check.fairness``: right ones in unusual forms, wrong ones that look right."""

import hashlib
import itertools
import operator
import statistics
import struct
from fractions import Fraction

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from answers.fairness import all_say, from_pairs, in_turns
from answers.ring import neighbours
from labkit.collectives import all_gather, broadcast, gather, naive_all_reduce, ring_all_reduce
from workbook import check

travel_by_value(__name__)


# replicas_agree(comm, tensor)


def compares_digests(comm, tensor):
    digest = hashlib.sha256(tensor.numpy().tobytes()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    return all(torch.equal(mine, theirs) for theirs in all_gather(comm, mine))


def compares_with_rank_0(comm, tensor):
    first = broadcast(comm, tensor.clone(), 0)
    return torch.tensor(all_say(comm, bool((first == tensor).all())))


def rank_0_decides(comm, tensor):
    found = gather(comm, tensor, 0)
    verdict = torch.zeros(1, dtype=torch.bool)
    if found:
        verdict[0] = all(torch.equal(found[0], other) for other in found[1:])
    return broadcast(comm, verdict, 0)


def votes_with_numbers(comm, tensor):
    first = broadcast(comm, tensor.clone(), comm.world_size - 1)
    votes = torch.tensor([float(torch.equal(first, tensor))])
    return naive_all_reduce(comm, votes).item() == comm.world_size


def adds_up_the_differences(comm, tensor):
    right, left = neighbours(comm)
    theirs = comm.exchange(tensor, right, torch.empty_like(tensor), left)
    different = (theirs != tensor).sum().reshape(1)
    return np.bool_(ring_all_reduce(comm, different).item() == 0)


def is_one_of_one_kind(comm, tensor):
    return len({tuple(other.tolist()) for other in all_gather(comm, tensor)}) == 1


def answers_one_or_zero(comm, tensor):
    words = struct.unpack(f"{len(tensor)}i", tensor.numpy().tobytes())
    bits = torch.tensor(words, dtype=torch.int64)
    spread = ring_all_reduce(comm, bits.clone(), "max") - ring_all_reduce(comm, bits, "min")
    return int(spread.max() == 0)


def reduces_in_place_twice(comm, tensor):
    return torch.equal(ring_all_reduce(comm, tensor, "min"), ring_all_reduce(comm, tensor, "max"))


def compares_the_first_numbers(comm, tensor):
    found = all_gather(comm, tensor[:4].clone())
    return all(torch.equal(found[0], other) for other in found)


def compares_all_but_the_last_number(comm, tensor):
    found = all_gather(comm, tensor[: max(len(tensor) - 1, 1)].clone())
    return all(torch.equal(found[0], other) for other in found)


def ranks_0_and_1_and_last_alone(comm, tensor):
    found = all_gather(comm, tensor)
    return torch.equal(found[0], found[1]) and torch.equal(found[0], found[-1])


def forgets_rank_0(comm, tensor):
    found = all_gather(comm, tensor)
    return all(torch.equal(found[-1], other) for other in found[1:])


def adds_up_in_float64(comm, tensor):
    ends = tensor[[0, -1]].double()
    sums = torch.cat([ends, tensor.double().sum().reshape(1)])
    found = all_gather(comm, sums)
    return all(torch.equal(found[0], other) for other in found)


def has_no_relative_tolerance(comm, tensor):
    first = broadcast(comm, tensor.clone(), 0)
    return all_say(comm, torch.allclose(first, tensor, rtol=0, atol=1e-9))


def multiplies_by_the_ranks(comm, tensor):
    """Right only if P times a number is what P additions of it come to."""
    total = ring_all_reduce(comm, tensor.clone())
    return all_say(comm, torch.equal(total, comm.world_size * tensor * 1.0000001))


def answers_with_a_word(comm, tensor):
    return "yes"


def answers_by_number(comm, tensor):
    """Returns the tensor that should have been compared."""
    return ring_all_reduce(comm, tensor.clone(), "max") == tensor


def asks_the_neighbour_and_one_more(comm, tensor):
    right, left = neighbours(comm)
    theirs = comm.exchange(tensor, right, torch.empty_like(tensor), left)
    mine = torch.tensor([float(torch.equal(theirs, tensor))])
    other = comm.exchange(mine, right, torch.empty(1), left)
    return bool(mine and other)


RIGHT = [
    compares_digests,
    compares_with_rank_0,
    rank_0_decides,
    votes_with_numbers,
    adds_up_the_differences,
    is_one_of_one_kind,
    answers_one_or_zero,
]
WRONG = [
    (compares_the_first_numbers, "replicas.one_place", "in its number 11"),
    (compares_all_but_the_last_number, "replicas.one_place"),
    (forgets_rank_0, "replicas.far", "rank 0 differs"),
    (adds_up_in_float64, "replicas.last_bit"),
    (has_no_relative_tolerance, "replicas.last_bit"),
    (multiplies_by_the_ranks, "replicas.never"),
    (answers_with_a_word, "replicas.kind"),
    (answers_by_number, "replicas.kind"),
]
# On fewer ranks these are right, or another rank tells.
WRONG_ON_FOUR = [
    (reduces_in_place_twice, "replicas.far", "rank 3 differs by 1 in every number"),
    (ranks_0_and_1_and_last_alone, "replicas.far", "rank 2 differs"),
    (asks_the_neighbour_and_one_more, "replicas.disagree", "rank 0 says False, rank 1 says False"),
]


# interleaved_ratio(a, b, repeats)


def with_numpy(a, b, repeats):
    pairs = np.array([in_order(a, b, n) for n in range(repeats + 1)])
    return np.median(pairs[1:, 1] / pairs[1:, 0])


def in_order(a, b, number):
    """(a's seconds, b's seconds), b first if the number is odd."""
    seconds = {run: run() for run in ((a, b), (b, a))[number % 2]}
    return seconds[a], seconds[b]


def with_torch(a, b, repeats):
    pairs = torch.tensor([in_order(a, b, n) for n in range(repeats + 1)])[1:]
    return (pairs[:, 1] / pairs[:, 0]).median()


def b_first(a, b, repeats):
    pairs = [in_order(a, b, number) for number in range(1, repeats + 2)]
    return np.float32(statistics.median(y / x for x, y in pairs[1:]))


def recursively(a, b, repeats):
    def pairs(number):
        if number > repeats:
            return ()
        first, second = in_order(a, b, number)
        return (second / first, *pairs(number + 1))

    _, *ratios = pairs(0)
    return sorted(ratios)[repeats // 2]


def with_exact_fractions(a, b, repeats):
    in_order(a, b, 0)
    found = [in_order(a, b, number) for number in range(repeats)]
    return statistics.median(Fraction(y) / Fraction(x) for x, y in found)


def cycles(a, b, repeats):
    a(), b()
    ratios = []
    for one, other in itertools.islice(itertools.cycle([(b, a), (a, b)]), repeats):
        first, second = one(), other()
        ratios.append(second / first if one is a else first / second)
    ratios.sort()
    return (ratios[(repeats - 1) // 2] + ratios[repeats // 2]) / 2


def always_seven(a, b, repeats):
    return statistics.median(y / x for x, y in in_turns(a, b, 7)[1:])


def above_one(a, b, repeats):
    ratio = statistics.median(y / x for x, y in in_turns(a, b, repeats)[1:])
    return max(ratio, 1 / ratio)


def divides_by_who_began(a, b, repeats):
    ratios = []
    for number in range(repeats + 1):
        one, other = ((a, b), (b, a))[number % 2]
        first, second = one(), other()
        ratios.append(second / first)
    return statistics.median(ratios[1:])


def warms_up_then_all_of_a(a, b, repeats):
    a(), b()
    firsts = [a() for _ in range(repeats)]
    return statistics.median(b() / first for first in firsts)


def warms_up_a_alone(a, b, repeats):
    a()
    return statistics.median(y / x for x, y in in_turns(a, b, repeats - 1))


def one_pair_too_few(a, b, repeats):
    return statistics.median(y / x for x, y in in_turns(a, b, repeats)[2:] or [(1, 1)])


def with_its_neighbour(a, b, repeats):
    """The seconds of b are divided by those of a in the next pair."""
    (_, *firsts), (_, *seconds) = zip(*in_turns(a, b, repeats))
    return statistics.median(y / x for x, y in zip(firsts[1:] + firsts[:1], seconds))


def as_text(a, b, repeats):
    return f"{statistics.median(y / x for x, y in in_turns(a, b, repeats)[1:]):.3f}"


def takes_the_middle_unsorted(a, b, repeats):
    ratios = [y / x for x, y in in_turns(a, b, repeats)[1:]]
    return ratios[repeats // 2]


def rounds(a, b, repeats):
    return round(statistics.median(y / x for x, y in in_turns(a, b, repeats)[1:]), 2)


RIGHT_RATIOS = [with_numpy, with_torch, b_first, recursively, with_exact_fractions, cycles]
WRONG_RATIOS = [
    (always_seven, "turns.count", "a was called 8 times, expected 5"),
    (above_one, "ratio.above_one"),
    (divides_by_who_began, "ratio.differs"),
    (warms_up_then_all_of_a, "turns.not_in_turns"),
    (warms_up_a_alone, "turns.count", "b was called 7 times, expected 8"),
    (one_pair_too_few, "ratio.differs"),
    (with_its_neighbour, "ratio.differs"),
    (as_text, "ratio.kind"),
    (takes_the_middle_unsorted, "ratio.differs", "not ratio.warm_up"),
    (rounds, "ratio.differs"),
    (
        from_pairs(lambda a, b: statistics.geometric_mean(map(operator.truediv, b, a))),
        "ratio.differs",
    ),
    (from_pairs(lambda a, b: [y / x for x, y in zip(a, b)]), "ratio.kind"),
]


ANSWERS = [
    Answers(check.fairness.replicas_agree, RIGHT, WRONG),
    Answers(check.fairness.replicas_agree, [], WRONG_ON_FOUR, on=4),
    Answers(check.fairness.interleaved_ratio, RIGHT_RATIOS, WRONG_RATIOS),
]
