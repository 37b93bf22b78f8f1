"""Page 17: the things that a benchmark has to look at beside its clock.

Symbols: P ranks.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbook.exercises.grader import Case, Check, Wrong, judged, solved
from workbook.exercises.grader.compare import agree, beside, fit


@solved(
    *(((64, 64),), ((2, 2),), ((96, 96, 96, 96),), ((12, 12, 12),), ((0, 0, 0, 0, 0),)),
    ((40, 40, 40, 40, 40, 40),),
    mistakes={
        "each rank sends 2 (P - 1) messages: do not add up those of all ranks": (
            lambda count, messages: sum(messages) // (2 * (len(messages) - 1))
        ),
    },
)
def synchronisations(messages: Sequence[int]) -> int:
    """Grade ``fn(messages)``: the ring all-reduces of an epoch, from each rank's messages."""
    return messages[0] // (2 * (len(messages) - 1))


# Samples of the data set, samples by rank, seconds by epoch.
@solved(
    more=lambda random: [
        (
            random.randint(400, 1200),
            tuple(random.choices(range(100, 500), k=2 + epochs % 3)),
            tuple(random.choices((1.0, 1.5, 2.0, 2.5, 9.0), k=epochs)),
        )
        for epochs in range(2, 12)
    ],
    mistakes={
        # The reference drops the first of the seconds that it is given.
        "the mean has the first epoch in it, which is warm-up": (
            lambda rate, size, by_rank, seconds: rate(size, by_rank, (0, statistics.mean(seconds)))
        ),
    },
)
def useful_rate(
    train_size: int, samples_by_rank: Sequence[int], epoch_seconds: Sequence[float]
) -> float:
    """Grade ``fn(train_size, samples_by_rank, epoch_seconds)``: useful samples per second.

    Of the median epoch without the first; samples that another rank has done, too, do not count.
    """
    return min(train_size, sum(samples_by_rank)) / statistics.median(epoch_seconds[1:])


# Differences between the parameters of one rank and those of the others.
_DIFFERENCES: dict[str, Callable[[Tensor], object]] = {
    "equal on all ranks": lambda values: None,
    "rank {} differs by 1 in every number": lambda values: values.add_(1),
    "rank {} differs by 1 in its first number": lambda values: values[:1].add_(1),
    "rank {} differs by 1 in its last number": lambda values: values[-1:].add_(1),
    "rank {} differs in the last bit of its number 4": (
        lambda values: values[4:5].copy_(torch.nextafter(values[4:5], torch.tensor(torch.inf)))
    ),
    # Neither the first nor the last number moves.
    "rank {} differs in the order of its numbers": (
        lambda values: values[3:5].copy_(values[3:5].flip(0))
    ),
}
# In a sum with the other numbers, or with an absolute tolerance, its last bit is lost.
_TINY = 1e-30


def _difference(case: Case) -> tuple[int, str]:
    """The rank that differs, another one each time, and how."""
    turn, kind = divmod(case.size, len(_DIFFERENCES))
    return (turn + case.call) % case.world_size, [*_DIFFERENCES][kind]


def _replica(rank: int, case: Case) -> tuple[Tensor]:
    """[case.size], this rank's parameters."""
    parameters = case.random(0, case.size)
    parameters[case.size // 3 :: 3] = _TINY
    differing_rank, difference = _difference(case)
    if rank == differing_rank:
        _DIFFERENCES[difference](parameters)
    return (parameters,)


replicas_agree = Check(
    "fairness.replicas_agree",
    lambda rank, case: "equal" in _difference(case)[1],
    inputs=_replica,
    written=None,
    keeps=("tensor",),
    sizes=tuple(range(7, 19)),
    special=lambda case: _difference(case)[1].format(_difference(case)[0]),
)

# The factor of the first call of each, and that of the machine's noise at the n-th call.
_COLD = {"a": 10.0, "b": 4.0}
_HICCUPS = (1.0, 1.05, 1.3, 0.95, 0.8, 1.1, 0.9, 2.5, 1.2, 1.0, 0.85)
_MIDDLES = (statistics.median_low, statistics.median_high)


# Odd, even and one: only an odd number of pairs leaves a single median. In some of them b is the
# faster one, so that a ratio turned to be above 1 is noticed.
@judged("a, b, repeats", (1.5, 7), (0.6, 4), (0.6, 1))
def interleaved_ratio(fn: Callable, b_costs: float, repeats: int) -> Wrong | None:
    """Grade ``fn(a, b, repeats)``: the median over pairs of runs of b's seconds / a's.

    ``a()`` and ``b()`` return the seconds of one run, on a simulated machine that slows down by a
    tenth each time. ``fn`` has to call each once to warm up, then make ``repeats`` pairs, which
    begin with a and with b alternately.
    """
    order = []
    seconds = {"a": [], "b": []}

    def contender(name: str, cost_s: float) -> Callable[[], float]:
        def run() -> float:
            noise = 1.1 ** len(order) * _HICCUPS[len(order) % len(_HICCUPS)]
            seconds[name].append(cost_s * noise * (1.0 if seconds[name] else _COLD[name]))
            order.append(name)
            return seconds[name][-1]

        return run

    ratio = fit(fn(contender("a", 1.0), contender("b", b_costs), repeats), 0.0)
    pairs = ["".join(order[i : i + 2]) for i in range(0, len(order), 2)]
    text = f"the runs came in the pairs {' '.join(pairs) or '(none)'}"
    if len(pairs) != repeats + 1 or any(pair not in ("ab", "ba") for pair in pairs):
        text += f", expected one pair to warm up, then {repeats}, each with one a and one b"
        return Wrong(text)
    # The warm-up pair is not counted, so it may begin with either.
    if any(pair == following for pair, following in itertools.pairwise(pairs[1:])):
        return Wrong(f"{text}\ntwo pairs in a row begin with the same one")
    ratios = [b / a for a, b in zip(seconds["a"], seconds["b"])]
    expected = statistics.median(ratios[1:])
    if agree(ratio, expected):
        return None
    text = f"the function returned {beside(ratio, expected)}, the median of the pairs' b / a"
    a_s = statistics.median(seconds["a"][1:])
    b_s = statistics.median(seconds["b"][1:])
    if any(agree(ratio, middle(ratios[1:])) for middle in _MIDDLES):
        text += "\nof an even number of pairs it is the mean of the two in the middle"
    elif agree(ratio, statistics.median(ratios)):
        text += "\nthe warm-up pair is counted, too"
    elif agree(ratio, b_s / a_s):
        text += "\nthat is the ratio of the two medians, not the median of the pairs' ratios"
    return Wrong(text)
