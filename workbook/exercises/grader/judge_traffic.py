"""Compare what the ranks sent with the target: messages, bytes, peers and rounds.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from workbook.exercises.grader.critical_path import steps_in_a_row
from workbook.exercises.grader.exercise import (
    Case,
    Exercise,
    Outcome,
    Problem,
    Target,
    at_its_size,
    where,
)
from workbook.exercises.grader.judge_cards import ROW as CARD, card_problems
from workbook.exercises.grader.words import Mistake

# A row of the table -> the field of an outcome and of a target that it shows.
FIELDS = {
    "messages": "messages",
    "bytes": "num_bytes",
    "peers": "peers",
    "rounds": "operations",
    "barriers": "barriers",
}
COUNTED = ("messages", "bytes", "rounds", "barriers")
# Where even ranks send first and odd ones receive first, an odd ring has a chain of three.
_LONGEST_CHAIN = 3
Ranks = tuple[Outcome, ...]


def traffic_problems(
    exercise: Exercise, cases: list[Case], outcomes: list[Ranks], *, right: bool
) -> list[Problem]:
    """Return the first problem of each row of the table, over the cases in order.

    Args:
        right: whether all values are right; then less than the target is better.
    """
    problems: dict[str, Problem] = {}
    looks: dict[str, set[str]] = defaultdict(set)
    for case, ranks in zip(cases, outcomes):
        for problem in _problems(exercise, case, ranks, right):
            problems.setdefault(problem.row, at_its_size(problem, case, exercise))
            looks[problem.row].add(_look_of(problem))
    for row, problem in problems.items():
        if len(looks[row]) > 1 and problem.mistake and row in COUNTED:
            # Not all cases agree with what the first one looks like.
            problem.mistake.why = None
            problems[row] = replace(problem, named=False)
    found = [problems[row] for row in (*FIELDS, CARD) if row in problems]
    # A wrong number of messages explains wrong bytes and rounds: only the table shows those.
    return [p if p.named or p is found[0] else replace(p, mistake=None) for p in found]


def _look_of(problem: Problem) -> str:
    why = problem.mistake and problem.mistake.why
    return why.id if isinstance(why, Mistake) else ""


def praise(exercise: Exercise, case: Case, ranks: Ranks) -> list[str]:
    """A sentence for each row in which the ranks have done better than the target asks."""
    said = []
    for row, spent, due in _judged_rows(exercise, case, ranks):
        if None in due:
            continue
        if sum(spent) < sum(due):
            numbers = f"{counts(spent)}, where the target is {counts(due)}"
            said.append(f"Better than the target: {where(case, exercise)}, {row} are {numbers}.")
        elif row == "rounds" and sum(spent) > sum(due):
            said.append(
                "Rounds: a send and a receive take turns here, in an order that no rank has to "
                "wait for long; comm.exchange does both in one call."
            )
    return said


def _judged_rows(
    exercise: Exercise, case: Case, ranks: Ranks
) -> Iterator[tuple[str, list[int], list[Any]]]:
    """(row, what was spent, the target), by rank or of all together, where there is a target."""
    if exercise.target is not None:
        targets = [exercise.target(rank, case) for rank in range(case.world_size)]
        for row in COUNTED if any(target != Target() for target in targets) else ():
            yield row, by_rank(row, ranks), by_rank(row, targets)
    if exercise.total is not None:
        for row in COUNTED:
            spent = by_rank(row, ranks)
            in_all = sum(spent) if row in ("messages", "bytes") else max(spent)
            yield row, [in_all], by_rank(row, [exercise.total(case)])


def _problems(exercise: Exercise, case: Case, ranks: Ranks, right: bool) -> list[Problem]:
    found = []
    place, hub, targets = where(case, exercise), None, None
    if exercise.target is not None:
        targets = [exercise.target(rank, case) for rank in range(case.world_size)]
        hub = _bottleneck(ranks, targets)
    for row, spent, due in _judged_rows(exercise, case, ranks):
        takes_turns = row == "rounds" and targets and _takes_turns(ranks, targets)
        if takes_turns or not _off(row, spent, due, exercise, case, right):
            continue
        told_place, together = place, len(spent) < len(ranks)
        if together:
            who = "all ranks together" if row in ("messages", "bytes") else "the busiest rank"
            told_place, look = f"{place}, {who}", _look_together(row, spent[0], due[0])
        else:
            look = _look(row, spent, due, ranks, exercise, case)
        look = look or (hub if row == "messages" else None)
        found.append(_off_target(row, told_place, counts(spent), counts(due), look))
    found += _peers(place, ranks, targets, hub) if targets else []
    return found + card_problems(exercise, case, ranks)


def _off(
    row: str, spent: list[int], due: list, exercise: Exercise, case: Case, right: bool
) -> bool:
    """Whether a row of the table misses its target."""
    if row == "messages" and not any(spent) and any(due):
        # Without a message, a right value is a guess, or there is nothing to send.
        return not right or case.size > 0 or not exercise.sizes
    return any(_differs(s, d, exercise, case, right) for s, d in zip(spent, due))


def _takes_turns(ranks: Ranks, targets: list[Target]) -> bool:
    """Whether exchanges are but divided into a send and a recv, in an order without a queue."""
    for outcome, target in zip(ranks, targets):
        if target.messages is None or target.operations is None:
            return False
        if outcome.messages > target.messages or outcome.operations > 2 * target.operations:
            return False
    chain = steps_in_a_row([outcome.steps for outcome in ranks])
    due = max(target.operations or 0 for target in targets)
    return chain is not None and chain <= _LONGEST_CHAIN * due


def by_rank(row: str, things: Iterable[Outcome | Target]) -> list:
    """The numbers of the outcomes, or targets, in a row of the table, by rank."""
    return [getattr(thing, FIELDS[row]) for thing in things]


def _off_target(
    row: str, place: str, spent: str | int, due: str | int | None, look: Mistake | None
) -> Problem:
    told = Mistake("traffic.off_target", look, place=place, spent=spent, due=due)
    return Problem(row, f"{spent}, not {due}", told, named=look is not None)


def _differs(spent: int, due: int | None, exercise: Exercise, case: Case, right: bool) -> bool:
    if due is None or spent == due:
        return False
    # An empty chunk may travel as an empty message, or not at all.
    empty_chunks = exercise.chunked and case.size < case.world_size
    return spent > due or not (right or empty_chunks or exercise.any_chunks)


def counts(numbers: list) -> str:
    """``3`` if all ranks have the same number, else the numbers by rank: ``3 1 1 1``."""
    return str(numbers[0]) if len(set(numbers)) == 1 else " ".join(map(str, numbers))


def _look(
    row: str, spent: list[int], due: list, ranks: Ranks, exercise: Exercise, case: Case
) -> Mistake | None:
    """The mistake that the difference looks like."""
    messages = by_rank("messages", ranks)
    if row == "messages" and not any(spent):
        return Mistake("traffic.nothing")
    if row == "barriers":
        return Mistake("traffic.barrier")
    if None in due:
        return None
    if row == "rounds":
        return _look_at_rounds(due, ranks, exercise, case)
    differences = {s - d for s, d in zip(spent, due)}
    if row == "messages" and differences in ({1}, {-1}):
        return Mistake("messages.one_more" if differences == {1} else "messages.one_less")
    if row == "bytes" and exercise.chunked and any(messages):
        whole = 4 * case.size
        # A rank whose chunk is the whole tensor sends no more than is due.
        if spent != due and all(s == whole * m >= d for s, m, d in zip(spent, messages, due)):
            return Mistake("bytes.whole_tensor")
    twice = any(spent) and all(s == 2 * d for s, d in zip(spent, due))
    return Mistake("traffic.doubled") if twice else None


def _look_at_rounds(
    due: list[int], ranks: Ranks, exercise: Exercise, case: Case
) -> Mistake | None:
    target = exercise.target
    if target is None or by_rank("messages", ranks) != by_rank(
        "messages", [target(rank, case) for rank in range(len(ranks))]
    ):
        return None
    chain = steps_in_a_row([outcome.steps for outcome in ranks])
    in_a_row = chain is not None and chain > _LONGEST_CHAIN * max(due)
    return Mistake("rounds.in_a_row", chain=chain, due=max(due)) if in_a_row else None


def _look_together(row: str, spent: int, due: int | None) -> Mistake | None:
    if row == "barriers":
        return Mistake("traffic.barrier")
    if row != "messages":
        return None
    if due is not None and spent == due + 1:
        return Mistake("messages.one_in_all_more")
    return None if spent else Mistake("traffic.nothing")


def _bottleneck(ranks: Ranks, targets: list[Target]) -> Mistake | None:
    """The mistake that all ranks send to one, unless the target asks for that."""
    hub = _hub([set(outcome.bytes_to) for outcome in ranks])
    due = _hub([target.peers for target in targets])
    if hub is None or hub == due:
        return None
    if due is not None:
        return Mistake("peers.other_hub", hub=hub, due=due)
    return Mistake("peers.bottleneck", hub=hub)


def _hub(peers: list) -> int | None:
    """The only rank to which all others send; None if there is none, or with two ranks."""
    P = len(peers)
    for hub in range(P if P > 2 else 0):
        if all(peers[rank] == {hub} for rank in range(P) if rank != hub):
            return hub
    return None


def _peers(place: str, ranks: Ranks, targets: list[Target], hub: Mistake | None) -> list[Problem]:
    """The problem of the first rank that sends to a peer that is not allowed, if any."""
    P = len(ranks)
    to_right = [target.peers == {(rank + 1) % P} for rank, target in enumerate(targets)]
    to_left = [target.peers == {(rank - 1) % P} for rank, target in enumerate(targets)]
    for rank, (outcome, target) in enumerate(zip(ranks, targets)):
        if target.peers is None or not (stray := set(outcome.bytes_to) - target.peers):
            continue
        why, left, right = hub, (rank - 1) % P, (rank + 1) % P
        if not why and stray == {left} and all(to_right):
            why = Mistake("peers.left")
        elif not why and stray == {right} and all(to_left):
            why = Mistake("peers.right")
        to, may = (", ".join(map(str, sorted(peers))) for peers in (stray, target.peers))
        to = f"rank {to}" if len(stray) == 1 else f"ranks {to}"
        told = Mistake("peers.wrong", why, place=place, rank=rank, stray=to, allowed=may or "none")
        return [Problem("peers", "wrong", told)]
    return []
