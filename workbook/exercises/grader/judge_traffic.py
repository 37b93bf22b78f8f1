"""Compare what the ranks sent with the target, and a puzzle's score with the best known.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from labkit.units import format_count
from workbook.exercises.grader.critical_path import steps_in_a_row
from workbook.exercises.grader.exercise import Case, Exercise, Outcome, Ranks, Score, Target
from workbook.exercises.grader.judge_values import Problem

# A row of the table -> the field of an outcome and of a target that it shows.
FIELDS = {"messages": "messages", "bytes": "num_bytes", "rounds": "operations"}
FIELDS["barriers"] = "barriers"
# Where even ranks send first and odd ones receive first, an odd ring has a chain of three.
_LONGEST_CHAIN = 3


def traffic_problems(
    exercise: Exercise, tried: Mapping[Case, Ranks], *, right: bool
) -> list[Problem]:
    """Return the first problem of each row of the table; only the first of them has a sentence.

    Args:
        right: whether all values are right; then less than the target is better.
    """
    problems: dict[str, Problem] = {}
    for case, ranks in tried.items():
        for row, spent, target in judged_rows(exercise, case, ranks):
            if row in problems or not _off(row, spent, target, exercise, case, right):
                continue
            if row == "rounds" and exercise.target and _takes_turns(exercise, case, ranks):
                continue
            together = len(spent) < len(ranks)
            who = ", all ranks together" if together else ""
            text = f"{exercise.where(case)}{who}: {counts(spent)} {row}, where the target is "
            text += counts(target)
            why = _why(row, spent, target, exercise, case, ranks)
            text += f": {why}" if why else ""
            problems[row] = Problem(row, f"{counts(spent)}, not {counts(target)}", text)
        stray = _stray_peers(exercise, case, ranks)
        if stray and "peers" not in problems:
            problems["peers"] = Problem("peers", "wrong", stray)
    found = [problems[row] for row in (*FIELDS, "peers") if row in problems]
    # A wrong number of messages explains wrong bytes and rounds: only the table shows those.
    return found[:1] + [one._replace(sentence="") for one in found[1:]]


def judged_rows(
    exercise: Exercise, case: Case, ranks: Ranks
) -> Iterator[tuple[str, list[int], list[Any]]]:
    """(row, what was spent, the target), by rank or of all together, where there is a target."""
    if exercise.target is not None:
        targets = [exercise.target(rank, case) for rank in range(case.world_size)]
        for row in FIELDS if any(target != Target() for target in targets) else ():
            yield row, by_rank(row, ranks), by_rank(row, targets)
    if exercise.total is not None:
        for row in FIELDS:
            spent = by_rank(row, ranks)
            in_all = sum(spent) if row in ("messages", "bytes") else max(spent)
            yield row, [in_all], by_rank(row, [exercise.total(case)])


def by_rank(row: str, things: Sequence[Outcome | Target]) -> list:
    """The numbers of the outcomes, or targets, in a row of the table, by rank."""
    return [getattr(thing, FIELDS[row]) for thing in things]


def counts(numbers: list) -> str:
    """``3`` if all ranks have the same number, else the numbers by rank: ``3 1 1 1``."""
    return str(numbers[0]) if len(set(numbers)) == 1 else " ".join(map(str, numbers))


def praise(exercise: Exercise, case: Case, ranks: Ranks) -> list[str]:
    """A sentence for each row in which the ranks have done better than the target asks."""
    return [
        f"Better than the target: {exercise.where(case)}, {row} are {counts(spent)}, where the "
        f"target is {counts(target)}."
        for row, spent, target in judged_rows(exercise, case, ranks)
        if None not in target and sum(spent) < sum(target)
    ]


def _off(
    row: str, spent: list[int], target: list, exercise: Exercise, case: Case, right: bool
) -> bool:
    """Whether a row of the table misses its target."""
    if row == "messages" and not any(spent) and any(target):
        # Without a message, a right value is a guess, or there is nothing to send.
        return not right or case.size > 0 or not exercise.sizes
    # An empty chunk may travel as an empty message, or not at all.
    empty_chunks = exercise.chunked and case.size < case.world_size
    less_is_right = right or empty_chunks or exercise.any_chunks
    return any(
        t is not None and (s > t or (s < t and not less_is_right)) for s, t in zip(spent, target)
    )


def _why(
    row: str, spent: list[int], target: list, exercise: Exercise, case: Case, ranks: Ranks
) -> str:
    if row == "messages" and not any(spent):
        return "nothing was sent"
    if row == "barriers":
        return "comm.barrier sends messages, too; send and recv wait for their peer by themselves"
    messages = [outcome.messages for outcome in ranks]
    whole = row == "bytes" and exercise.chunked and any(messages)
    if whole and spent == [4 * case.size * count for count in messages]:
        return "each message holds the whole tensor, instead of one chunk"
    chain = steps_in_a_row([outcome.steps for outcome in ranks]) if row == "rounds" else None
    if chain is not None and None not in target and chain > _LONGEST_CHAIN * max(target):
        return f"the ranks wait for each other in a row, {chain} steps long; comm.exchange helps"
    return ""


def _takes_turns(exercise: Exercise, case: Case, ranks: Ranks) -> bool:
    """Whether exchanges are but divided into a send and a recv, in an order without a queue."""
    assert exercise.target is not None
    targets = [exercise.target(rank, case) for rank in range(case.world_size)]
    for outcome, target in zip(ranks, targets):
        if target.messages is None or target.operations is None:
            return False
        if outcome.messages > target.messages or outcome.operations > 2 * target.operations:
            return False
    chain = steps_in_a_row([outcome.steps for outcome in ranks])
    most = max(target.operations or 0 for target in targets)
    return chain is not None and chain <= _LONGEST_CHAIN * most


def _stray_peers(exercise: Exercise, case: Case, ranks: Ranks) -> str:
    """What to say of the first rank that sends to a peer that is not allowed."""
    if exercise.target is None:
        return ""
    P, sent_to = case.world_size, [set(outcome.bytes_to) for outcome in ranks]
    allowed = [exercise.target(rank, case).peers for rank in range(P)]
    to_right = all(peers == {(rank + 1) % P} for rank, peers in enumerate(allowed))
    if to_right and all(peers <= {(rank - 1) % P} for rank, peers in enumerate(sent_to)):
        return ""  # a ring may run to the left as well
    for rank, peers in enumerate(allowed):
        if peers is None or not (stray := sent_to[rank] - peers):
            continue
        text = f"{exercise.where(case)}, rank {rank} sends to rank "
        text += f"{', '.join(map(str, sorted(stray)))}; allowed: "
        text += ", ".join(map(str, sorted(peers))) or "none"
        hubs = [
            h for h in range(P) if P > 2 and all(sent_to[r] == {h} for r in range(P) if r != h)
        ]
        return f"{text} (all ranks send to rank {hubs[0]}, the bottleneck)" if hubs else text
    return ""


class Scored(NamedTuple):
    """A score and the best known, as numbers and in words."""

    number: float
    best_number: float
    yours: str
    best: str

    def praise(self, score: Score, world_size: int) -> str:
        """What to say of a score that is as good as the best known, or better."""
        said = f"{self.yours} on {format_count(world_size, 'rank')}"
        if self.number < self.best_number * (1 - score.slack):
            return f"{said}: less than the best that this page knows, {self.best}!"
        return f"{said}: as good as the best known ({score.source})."


def score_of(
    exercise: Exercise, score: Score, tried: Mapping[Case, Ranks]
) -> tuple[Scored | None, Problem | None]:
    """(the score in the first case that is scored, what keeps it from the best)."""
    found = None
    for case, ranks in tried.items():
        best, number = score.best(case), score.of(case, ranks)
        if best is None:
            continue
        if number is None:
            why = "all results are right, but with recv_any the rounds cannot be counted: receive "
            return found, Problem("score", "untold", f"{why}from a rank that you name")
        one = Scored(number, best, score.shown(number), score.shown(best))
        found = found or one
        if number > best * (1 + score.slack):
            text = f"all results are right, and {exercise.where(case)} the score is {one.yours}; "
            text += f"the best known is {one.best} ({score.source})"
            return found, Problem("score", one.yours, text)
    return found, None
