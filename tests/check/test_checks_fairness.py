"""The checks of page 15 name what is wrong with each wrong answer, and pass the right one."""

import statistics
from functools import partial

import pytest
import torch
from graded import default_sizes, in_shared_runs
from ranks import travel_by_value

from labkit import check
from labkit.check import fairness
from labkit.collectives import ring_all_reduce

travel_by_value(__name__)


def right(comm, tensor):
    bits = tensor.view(torch.int32)
    low = ring_all_reduce(comm, bits.clone(), "min")
    high = ring_all_reduce(comm, bits.clone(), "max")
    return torch.equal(low, high)


def all_say(comm, mine):
    """What the most doubtful of the ranks says, on all of them."""
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
    (always_content, "rank 2 differs by 1 in every number, and nobody noticed"),
    (never_content, "the replicas are equal to the bit, and all say False"),
    (compares_sums, "differs in the last bit of one number, and that passes for equal"),
    (has_a_tolerance, "allclose has a tolerance"),
    (compares_sorted, "rank 1 holds the same numbers in another order"),
    (tells_what_it_sees, "each tells what it has seen itself"),
    (looks_at_rank_1_only, "rank 2 differs by 1 in every number, and nobody noticed"),
    (only_rank_0_knows, "rank 1 returns nothing: every rank has to know"),
    (returns_a_tensor, "rank 0 returns Tensor, where True or False is due"),
]


@pytest.fixture(scope="module")
def verdicts():
    checker = check.fairness.replicas_agree
    found = {size: partial(checker, right, world_sizes=(size,)) for size in default_sizes(checker)}
    return in_shared_runs(
        found | {wrong: partial(checker, wrong, world_sizes=(3,)) for wrong, _ in WRONG}
    )


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_a_wrong_look_at_the_replicas_is_told_by_its_mistake(wrong, words, verdicts):
    assert not verdicts[wrong].passed
    assert words in repr(verdicts[wrong])


def test_the_right_answer_passes_on_every_world_size(verdicts):
    for size in default_sizes(check.fairness.replicas_agree):
        assert verdicts[size].passed, verdicts[size]


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
    """The median, as long as the number of repeats is odd."""
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (no_call, "neither a nor b was called"),
        (one_after_the_other, "all runs of one come before all runs of the other"),
        (a_always_first, "pairs in a row begin with the same contender"),
        (without_warm_up, "a was called 7 times, where 8 are due"),
        (three_in_a_row, "a was called 16 times"),
        (raises, "it raised ZeroDivisionError"),
        (3, "a function is needed, got int"),
        (from_pairs(lambda a, b: None), "a number is due, and it returns NoneType"),
        (
            from_pairs(lambda a, b: statistics.median(x / y for x, y in zip(a, b))),
            "that is a / b, upside down",
        ),
        (
            from_pairs(lambda a, b: statistics.median(b) / statistics.median(a)),
            "the ratio of the medians",
        ),
        (from_pairs(lambda a, b: sum(b) / sum(a)), "the ratio of the sums"),
        (
            from_pairs(lambda a, b: statistics.fmean(y / x for x, y in zip(a, b))),
            "the mean of the ratios",
        ),
        (from_pairs(lambda a, b: min(b) / min(a)), "the best of b over the best of a"),
        (from_pairs(lambda a, b: max(y / x for x, y in zip(a, b))), "the largest of the ratios"),
        (from_pairs(lambda a, b: 1.5), "it returns 1.5, where the median"),
        (
            lambda a, b, n: statistics.median(y / x for x, y in in_turns(a, b, n)),
            "the warm-up is counted",
        ),
    ],
)
def test_a_wrong_way_to_take_times_is_told_by_its_mistake(wrong, words, capsys):
    assert not check.fairness.interleaved_ratio(wrong).passed
    said = capsys.readouterr().out
    assert words in said, said


def test_the_right_way_to_take_times_passes_and_a_stub_is_open(capsys):
    def stub(a, b, repeats):
        raise NotImplementedError

    assert check.fairness.interleaved_ratio(the_right_ratio).passed
    assert check.fairness.interleaved_ratio(warmed_up_apart).passed
    assert check.fairness.interleaved_ratio(lower_median).passed
    assert check.fairness.interleaved_ratio(stub).status == "not attempted yet"
    assert "7 pairs in turns" in capsys.readouterr().out


def test_each_mistake_leads_to_a_number_of_its_own():
    watch = fairness._Stopwatch()
    in_turns(watch.contender("a", 1.0), watch.contender("b", 1.5), fairness._REPEATS)
    numbers = [fairness._due(watch.seconds), *fairness._mistaken(watch.seconds).values()]
    assert len({round(number, 3) for number in numbers}) == len(numbers)
