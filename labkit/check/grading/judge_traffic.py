"""Compare what the ranks sent with the target: messages, bytes, peers and rounds.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Iterable
from dataclasses import replace

from labkit.check.grading.exercise import (
    Case,
    Exercise,
    Outcome,
    Problem,
    Target,
    at_its_size,
    where,
)
from labkit.check.grading.words import Mistake

# A row of the table -> the field of an outcome and of a target that it shows.
FIELDS = {"messages": "messages", "bytes": "num_bytes", "peers": "peers", "rounds": "operations"}
COUNTED = ("messages", "bytes", "rounds")
Ranks = tuple[Outcome, ...]


def traffic_problems(
    exercise: Exercise, cases: list[Case], outcomes: list[Ranks]
) -> list[Problem]:
    """Return the first problem of each row of the table, over the cases in order."""
    problems: dict[str, Problem] = {}
    for case, ranks in zip(cases, outcomes):
        for problem in _problems(exercise, case, ranks):
            problems.setdefault(problem.row, at_its_size(problem, case, exercise))
    found = [problems[row] for row in FIELDS if row in problems]
    # A wrong number of messages explains wrong bytes and rounds: only the table shows those.
    return [p if p.named or p is found[0] else replace(p, mistake=None) for p in found]


def _problems(exercise: Exercise, case: Case, ranks: Ranks) -> list[Problem]:
    found = []
    place = where(case, exercise)
    if exercise.target is not None:
        targets = [exercise.target(rank, case) for rank in range(case.world_size)]
        hub = _bottleneck(ranks, targets)
        for row in COUNTED:
            spent, due = by_rank(row, ranks), by_rank(row, targets)
            if any(_differs(s, d, exercise, case) for s, d in zip(spent, due)):
                look = _look(row, spent, due, by_rank("messages", ranks), exercise, case)
                look = look or (hub if row == "messages" else None)
                found.append(_off_target(row, place, counts(spent), counts(due), look))
        found += _peers(place, ranks, targets, hub)
    if exercise.total is not None:
        for row in COUNTED:
            in_all, who = sum(by_rank(row, ranks)), "all ranks together"
            if row == "rounds":
                in_all, who = max(by_rank(row, ranks)), "the busiest rank"
            (due,) = by_rank(row, [exercise.total(case)])
            if _differs(in_all, due, exercise, case):
                look = _look_together(in_all, due) if row == "messages" else None
                found.append(_off_target(row, f"{place}, {who}", in_all, due, look))
    return found


def by_rank(row: str, things: Iterable[Outcome | Target]) -> list:
    """The numbers of the outcomes, or targets, in a row of the table, by rank."""
    return [getattr(thing, FIELDS[row]) for thing in things]


def _off_target(
    row: str, place: str, spent: str | int, due: str | int | None, look: Mistake | None
) -> Problem:
    told = Mistake("traffic.off_target", look, place=place, spent=spent, due=due)
    return Problem(row, f"{spent}, not {due}", told, named=look is not None)


def _differs(spent: int, due: int | None, exercise: Exercise, case: Case) -> bool:
    if due is None or spent == due:
        return False
    # An empty chunk may travel as an empty message, or not at all.
    empty_chunks = exercise.chunked and case.size < case.world_size
    return spent > due or not empty_chunks


def counts(numbers: list) -> str:
    """``3`` if all ranks have the same number, else the numbers by rank: ``3 1 1 1``."""
    return str(numbers[0]) if len(set(numbers)) == 1 else " ".join(map(str, numbers))


def _look(
    row: str, spent: list[int], due: list, messages: list[int], exercise: Exercise, case: Case
) -> Mistake | None:
    """The mistake that the difference looks like."""
    if row == "messages" and not any(spent):
        return Mistake("traffic.nothing")
    if None in due:
        return None
    if row == "rounds":
        one_way = all(s == 2 * d == 2 * m for s, d, m in zip(spent, due, messages))
        return Mistake("rounds.send_then_recv") if one_way else None
    differences = {s - d for s, d in zip(spent, due)}
    if row == "messages" and differences in ({1}, {-1}):
        return Mistake("messages.one_more" if differences == {1} else "messages.one_less")
    if row == "bytes" and exercise.chunked and any(messages):
        whole = 4 * case.size
        if all(s == whole * m > d for s, m, d in zip(spent, messages, due)):
            return Mistake("bytes.whole_tensor")
    twice = any(spent) and all(s == 2 * d for s, d in zip(spent, due))
    return Mistake("traffic.doubled") if twice else None


def _look_together(messages: int, due: int) -> Mistake | None:
    if messages == due + 1:
        return Mistake("messages.one_in_all_more")
    return None if messages else Mistake("traffic.nothing")


def _bottleneck(ranks: Ranks, targets: list[Target]) -> Mistake | None:
    """The mistake that all ranks send to one, unless the target asks for that."""
    hub = _hub([set(outcome.bytes_to) for outcome in ranks])
    if hub is None or hub == _hub([target.peers for target in targets]):
        return None
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
    for rank, (outcome, target) in enumerate(zip(ranks, targets)):
        if target.peers is None or not (stray := set(outcome.bytes_to) - target.peers):
            continue
        why, left, right = hub, (rank - 1) % P, (rank + 1) % P
        if not why and stray == {left} and target.peers == {right}:
            why = Mistake("peers.left")
        elif not why and stray == {right} and target.peers == {left}:
            why = Mistake("peers.right")
        to, may = (", ".join(map(str, sorted(peers))) for peers in (stray, target.peers))
        to = f"rank {to}" if len(stray) == 1 else f"ranks {to}"
        told = Mistake("peers.wrong", why, place=place, rank=rank, stray=to, allowed=may or "none")
        return [Problem("peers", "wrong", told)]
    return []
