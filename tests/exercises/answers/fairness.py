"""Answers to ``check.fairness``."""

import statistics
from fractions import Fraction

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit.collectives import ring_all_reduce
from workbook import check

travel_by_value(__name__)


def right(comm, tensor):
    bits = tensor.view(torch.int32)
    low = ring_all_reduce(comm, bits.clone(), "min")
    high = ring_all_reduce(comm, bits.clone(), "max")
    return torch.equal(low, high)


def all_say(comm, mine):
    """Whether all ranks say True, on every rank."""
    return bool(ring_all_reduce(comm, torch.tensor([int(mine)]), "min").item())


def always_content(comm, tensor):
    return True


def never_content(comm, tensor):
    return False


def compares_sums(comm, tensor):
    sums = tensor.sum().reshape(1)
    low = ring_all_reduce(comm, sums.clone(), "min")
    return torch.equal(low, ring_all_reduce(comm, sums.clone(), "max"))


def has_a_tolerance(comm, tensor):
    mean = ring_all_reduce(comm, tensor.clone(), "mean")
    return all_say(comm, torch.allclose(mean, tensor))


def compares_sorted(comm, tensor):
    return right(comm, tensor.sort().values)


def tells_what_it_sees(comm, tensor):
    theirs = tensor.clone()
    right_one, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    comm.exchange(tensor, right_one, theirs, left)
    return torch.equal(theirs, tensor)


def looks_at_rank_1_only(comm, tensor):
    theirs = tensor.clone()
    if comm.rank == 0:
        comm.recv(theirs, 1)
    elif comm.rank == 1:
        comm.send(tensor, 0)
    return all_say(comm, torch.equal(theirs, tensor))


def only_rank_0_knows(comm, tensor):
    agree = right(comm, tensor)
    return agree if comm.rank == 0 else None


def returns_a_tensor(comm, tensor):
    return torch.tensor(right(comm, tensor))


WRONG = [
    (always_content, "replicas.far"),
    (never_content, "replicas.never"),
    (compares_sums, "replicas.last_bit"),
    (has_a_tolerance, "replicas.last_bit"),
    (compares_sorted, "replicas.order"),
    (tells_what_it_sees, "replicas.disagree"),
    (looks_at_rank_1_only, "replicas.far"),
    (only_rank_0_knows, "replicas.nothing"),
]


# a and b in turns


def in_turns(a, b, repeats):
    pairs = []
    for number in range(repeats + 1):
        if number % 2:
            second, first = b(), a()
        else:
            first, second = a(), b()
        pairs.append((first, second))
    return pairs


def the_right_ratio(a, b, repeats):
    return statistics.median(y / x for x, y in in_turns(a, b, repeats)[1:])


def lower_median(a, b, repeats):
    """Of an even number of repeats, the lower one of the two in the middle."""
    return statistics.median_low(y / x for x, y in in_turns(a, b, repeats)[1:])


def warmed_up_apart(a, b, repeats):
    a(), b()
    pairs = in_turns(a, b, repeats - 1)
    return statistics.median(y / x for x, y in pairs)


def one_after_the_other(a, b, repeats):
    first = [a() for _ in range(repeats + 1)]
    second = [b() for _ in range(repeats + 1)]
    return statistics.median(second) / statistics.median(first)


def a_always_first(a, b, repeats):
    pairs = [(a(), b()) for _ in range(repeats + 1)]
    return statistics.median(y / x for x, y in pairs[1:])


def without_warm_up(a, b, repeats):
    return statistics.median(y / x for x, y in in_turns(a, b, repeats - 1))


def three_in_a_row(a, b, repeats):
    for _ in range(repeats + 1):
        a(), a(), b(), b()
    return 1.5


def no_call(a, b, repeats):
    return 1.5


def raises(a, b, repeats):
    return a() / 0


def from_pairs(rule):
    def ratio(a, b, repeats):
        return rule(*zip(*in_turns(a, b, repeats)[1:]))

    return ratio


def two_and_two(a, b, repeats):
    for _ in range((repeats + 1) // 2):
        a(), a(), b(), b()
    return 1.5


WRONG_RATIOS = [
    (no_call, "turns.no_call"),
    (one_after_the_other, "turns.not_in_turns"),
    (a_always_first, "turns.same_first"),
    (without_warm_up, "turns.count"),
    (three_in_a_row, "turns.count"),
    (two_and_two, "turns.pairs"),
    (raises, "answer.raised"),
    (3, "fn.missing"),
    (from_pairs(lambda a, b: None), "ratio.kind"),
    (
        from_pairs(lambda a, b: statistics.median(x / y for x, y in zip(a, b))),
        "ratio.upside_down",
    ),
    (
        from_pairs(lambda a, b: statistics.median(b) / statistics.median(a)),
        "ratio.of_medians",
    ),
    (from_pairs(lambda a, b: sum(b) / sum(a)), "ratio.of_sums"),
    (
        from_pairs(lambda a, b: statistics.fmean(y / x for x, y in zip(a, b))),
        "ratio.mean",
    ),
    (from_pairs(lambda a, b: min(b) / min(a)), "ratio.of_bests"),
    (from_pairs(lambda a, b: max(y / x for x, y in zip(a, b))), "ratio.largest"),
    (from_pairs(lambda a, b: 1.5), "ratio.differs"),
    (
        lambda a, b, n: statistics.median(y / x for x, y in in_turns(a, b, n)),
        "ratio.warm_up",
    ),
]


# synchronisations(messages)


def of_rank_0(messages):
    return messages[0] // (2 * (len(messages) - 1))


def of_the_busiest(messages):
    return max(messages) / 2 / (len(messages) - 1)


def of_all_together(messages):
    return sum(messages) / len(messages) / (2 * len(messages) - 2)


def in_fractions(messages):
    return Fraction(messages[-1], 2 * (len(messages) - 1))


def with_an_array(messages):
    return np.mean(messages) / (2 * (len(messages) - 1))


def with_a_tensor(messages):
    return torch.tensor(messages).float().mean() / (2 * (len(messages) - 1))


def counts_down(messages):
    left, found = messages[0], 0
    while left > 0:
        left -= 2 * (len(messages) - 1)
        found += 1
    return found


WRONG_COUNTS = [
    (lambda messages: messages[0] // (len(messages) - 1), "synchronisations.half"),
    (
        lambda messages: sum(messages) // (2 * (len(messages) - 1)),
        "synchronisations.of_all",
    ),
    (lambda messages: messages[0] / len(messages) / 2, "synchronisations.ranks"),
    (lambda messages: messages[0] // 2, "synchronisations.two"),
    (max, "synchronisations.messages"),
    (lambda messages: 32, "answer.wrong"),
]


# useful_rate(train_size, samples_by_rank, epoch_seconds)


def useful(train_size, samples_by_rank, epoch_seconds):
    return min(train_size, sum(samples_by_rank)) / statistics.median(epoch_seconds[1:])


def by_numpy(train_size, samples_by_rank, epoch_seconds):
    done = np.minimum(train_size, np.sum(samples_by_rank))
    return done / np.median(np.array(epoch_seconds)[1:])


def by_torch(train_size, samples_by_rank, epoch_seconds):
    done = torch.tensor(samples_by_rank).sum().clamp(max=train_size)
    return done / torch.tensor(epoch_seconds[1:]).quantile(0.5)


def sorted_by_hand(train_size, samples_by_rank, epoch_seconds):
    _, *seconds = epoch_seconds
    seconds.sort()
    half = len(seconds) // 2
    median = seconds[half] if len(seconds) % 2 else sum(seconds[half - 1 : half + 1]) / 2
    done = sum(samples_by_rank)
    return (done if done < train_size else train_size) / median


def other_order(epoch_seconds, samples_by_rank, train_size):
    return useful(train_size, samples_by_rank, epoch_seconds)


def exact(train_size, samples_by_rank, epoch_seconds):
    seconds = Fraction(statistics.median(epoch_seconds[1:]))
    return min(Fraction(train_size), sum(map(Fraction, samples_by_rank))) / seconds


def later_median(epoch_seconds):
    return statistics.median(epoch_seconds[1:])


WRONG_RATES = [
    (lambda size, by_rank, s: sum(by_rank) / later_median(s), "rate.counts_twice"),
    (lambda size, by_rank, s: size / later_median(s), "rate.counts_undone"),
    (lambda size, by_rank, s: by_rank[0] / later_median(s), "rate.one_rank"),
    (
        lambda size, by_rank, s: min(size, sum(by_rank)) / statistics.median(s),
        "rate.warm_up",
    ),
    (
        lambda size, by_rank, s: min(size, sum(by_rank)) / statistics.fmean(s[1:]),
        "rate.mean",
    ),
    (lambda size, by_rank, s: min(size, sum(by_rank)) / min(s), "rate.best"),
    (
        lambda size, by_rank, s: later_median(s) / min(size, sum(by_rank)),
        "rate.per_sample",
    ),
    (lambda size, by_rank, s: None, "answer.nothing"),
]


ANSWERS = [
    Answers(
        check.fairness.synchronisations,
        [
            *(of_rank_0, of_the_busiest, of_all_together, in_fractions),
            *(with_an_array, with_a_tensor, counts_down),
        ],
        WRONG_COUNTS,
    ),
    Answers(
        check.fairness.useful_rate,
        [useful, by_numpy, by_torch, sorted_by_hand, other_order, exact],
        WRONG_RATES,
    ),
    Answers(check.fairness.replicas_agree, [right, returns_a_tensor], WRONG),
    Answers(
        check.fairness.interleaved_ratio,
        [the_right_ratio, warmed_up_apart, lower_median],
        WRONG_RATIOS,
    ),
]
