"""Compare what the ranks sent with the target.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Mapping, Sequence

from workbook.exercises.grader.critical_path import steps_in_a_row
from workbook.exercises.grader.exercise import Case, Exercise, Outcome, Ranks, Target

# A row of the table -> the field of an outcome and of a target that it shows.
ROWS = {"messages": "messages", "bytes": "num_bytes", "rounds": "operations"}
ROWS["barriers"] = "barriers"
# Where even ranks send first and odd ones receive first, an odd ring has a chain of three.
_LONGEST_CHAIN = 3


def traffic_problems(exercise: Exercise, tried: Mapping[Case, Ranks]) -> dict[str, str]:
    """The first problem by row of the table. Less than the target is better."""
    problems: dict[str, str] = {}
    if exercise.target is None:
        return problems
    for row in ROWS:
        for case, ranks in tried.items():
            if problem := _problem(exercise, case, ranks, row):
                problems[row] = problem
                break
    for case, ranks in tried.items():
        if stray := _stray_peers(ranks, targets_of(exercise, case)):
            problems["peers"] = f"{exercise.where(case)}, {stray}"
            break
    return problems


def _problem(exercise: Exercise, case: Case, ranks: Ranks, row: str) -> str:
    """The problem with one row in one case, or nothing."""
    targets = targets_of(exercise, case)
    spent = by_rank(row, ranks)
    target = by_rank(row, targets)
    text = f"{exercise.where(case)}: {counts(spent)} {row}, where the target is {counts(target)}"
    if row == "messages" and not any(spent) and any(target):
        # A right value is a guess, unless there is nothing to send.
        needs_messages = case.size > 0 or not exercise.sizes
        return f"{text}: nothing was sent" if needs_messages else ""
    limits = target
    if row == "bytes" and None not in target:
        # Whose chunk is the longer one depends on the ring's direction.
        limits = [max(target)] * len(ranks)
    if not any(limit is not None and count > limit for count, limit in zip(spent, limits)):
        return ""
    if row == "messages":
        times = max(spent) // max(target)
        if spent == [limit + 1 for limit in target]:
            text += ": one message too many on each rank"
        elif spent == [times * limit for limit in target]:
            text += f": as many as {times} calls take, where one is enough"
    elif row == "barriers":
        text += ": comm.barrier sends messages, too; send and recv wait by themselves"
    elif row == "bytes" and exercise.chunked:
        if spent == [4 * case.size * count for count in by_rank("messages", ranks)]:
            text += ": each message holds the whole tensor, instead of one chunk"
    elif row == "rounds" and None not in target:
        chain = steps_in_a_row([outcome.steps for outcome in ranks]) or 0
        longest = _LONGEST_CHAIN * max(target)
        # An exchange may be divided into a send and a recv, if no queue comes of it.
        if 0 < chain <= longest and _is_divided(ranks, targets):
            return ""
        if chain > longest:
            text += f": the ranks wait for each other in a row, {chain} steps long; "
            text += "comm.exchange helps"
    return text


def targets_of(exercise: Exercise, case: Case) -> list[Target]:
    """The targets of a case, by rank."""
    assert exercise.target is not None
    return [exercise.target(rank, case) for rank in range(case.world_size)]


def by_rank(row: str, things: Sequence[Outcome | Target]) -> list:
    """The numbers of the outcomes, or targets, in a row of the table, by rank."""
    return [getattr(thing, ROWS[row]) for thing in things]


def counts(numbers: list) -> str:
    """``3`` if all ranks have the same number, else the numbers by rank: ``3 1 1 1``."""
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return " ".join(map(str, numbers))


def _is_divided(ranks: Ranks, targets: list[Target]) -> bool:
    for outcome, target in zip(ranks, targets):
        if target.messages is None or outcome.messages > target.messages:
            return False
        if outcome.operations > 2 * (target.operations or 0):
            return False
    return True


def _stray_peers(ranks: Ranks, targets: list[Target]) -> str:
    """A sentence on the first rank that sends to a peer that is not allowed, or nothing."""
    P = len(ranks)
    to_right = all(target.peers == {(rank + 1) % P} for rank, target in enumerate(targets))
    goes_left = all({*outcome.bytes_to} <= {(rank - 1) % P} for rank, outcome in enumerate(ranks))
    if to_right and goes_left:
        return ""  # a ring may run to the left as well
    for rank, (outcome, target) in enumerate(zip(ranks, targets)):
        if target.peers is None:
            continue
        if stray := set(outcome.bytes_to) - target.peers:
            allowed = ", ".join(map(str, sorted(target.peers))) or "none"
            return f"rank {rank} sends to rank {min(stray)}; allowed: {allowed}"
    return ""
