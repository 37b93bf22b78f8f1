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
    """By row of the table: the first problem. Less than the target is better."""
    problems: dict[str, str] = {}
    for case, ranks in tried.items() if exercise.target else ():
        targets, place = targets_of(exercise, case), exercise.where(case)
        for row in ROWS:
            spent, target = by_rank(row, ranks), by_rank(row, targets)
            # Whose chunk is the longer one depends on the ring's direction.
            most = [max(target)] * len(ranks) if row == "bytes" and None not in target else target
            text = f"{place}: {counts(spent)} {row}, where the target is {counts(target)}"
            if row == "messages" and not any(spent) and any(target):
                # A right value is a guess, unless there is nothing to send.
                if case.size > 0 or not exercise.sizes:
                    problems.setdefault(row, f"{text}: nothing was sent")
            elif any(t is not None and s > t for s, t in zip(spent, most)):
                whole = [4 * case.size * count for count in by_rank("messages", ranks)]
                if row == "barriers":
                    text += ": comm.barrier sends messages, too; send and recv wait by themselves"
                elif row == "bytes" and exercise.chunked and spent == whole:
                    text += ": each message holds the whole tensor, instead of one chunk"
                elif row == "rounds" and None not in target:
                    chain = steps_in_a_row([outcome.steps for outcome in ranks]) or 0
                    # An exchange may be divided into a send and a recv, if no queue comes of it.
                    if 0 < chain <= _LONGEST_CHAIN * max(target) and _is_divided(ranks, targets):
                        continue
                    if chain > _LONGEST_CHAIN * max(target):
                        text += f": the ranks wait for each other in a row, {chain} steps long; "
                        text += "comm.exchange helps"
                problems.setdefault(row, text)
        if stray := _stray_peers(ranks, targets):
            problems.setdefault("peers", f"{place}, {stray}")
    return {row: problems[row] for row in (*ROWS, "peers") if row in problems}


def targets_of(exercise: Exercise, case: Case) -> list[Target]:
    """By rank."""
    assert exercise.target is not None
    return [exercise.target(rank, case) for rank in range(case.world_size)]


def by_rank(row: str, things: Sequence[Outcome | Target]) -> list:
    """The numbers of the outcomes, or targets, in a row of the table, by rank."""
    return [getattr(thing, ROWS[row]) for thing in things]


def counts(numbers: list) -> str:
    """``3`` if all ranks have the same number, else the numbers by rank: ``3 1 1 1``."""
    return str(numbers[0]) if len(set(numbers)) == 1 else " ".join(map(str, numbers))


def _is_divided(ranks: Ranks, targets: list[Target]) -> bool:
    return all(
        target.messages is not None
        and outcome.messages <= target.messages
        and outcome.operations <= 2 * (target.operations or 0)
        for outcome, target in zip(ranks, targets)
    )


def _stray_peers(ranks: Ranks, targets: list[Target]) -> str:
    """What to say of the first rank that sends to a peer that is not allowed."""
    P, sent_to = len(ranks), [set(outcome.bytes_to) for outcome in ranks]
    to_right = all(one.peers == {(rank + 1) % P} for rank, one in enumerate(targets))
    if to_right and all(peers <= {(rank - 1) % P} for rank, peers in enumerate(sent_to)):
        return ""  # a ring may run to the left as well
    for rank, target in enumerate(targets):
        if target.peers is not None and (stray := sent_to[rank] - target.peers):
            allowed = ", ".join(map(str, sorted(target.peers))) or "none"
            return f"rank {rank} sends to rank {min(stray)}; allowed: {allowed}"
    return ""
