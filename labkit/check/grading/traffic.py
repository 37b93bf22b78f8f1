"""Did the ranks send what the algorithm sends: messages, bytes, to whom, in how many rounds.

Symbols: P ranks, S bytes of a rank's tensor.
"""

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

ROWS = ("messages", "bytes", "peers", "rounds")
Ranks = tuple[Outcome, ...]


def traffic_problems(
    exercise: Exercise, cases: list[Case], outcomes: list[Ranks]
) -> list[Problem]:
    """For each row of the table the first problem, over the cases in their order."""
    problems: dict[str, Problem] = {}
    for case, ranks in zip(cases, outcomes):
        for problem in _problems(exercise, case, ranks):
            problems.setdefault(problem.row, at_its_size(problem, case, exercise))
    found = [problems[row] for row in ROWS if row in problems]
    # Another number of messages explains other bytes and rounds: the table shows them.
    return [p if p.named or p is found[0] else replace(p, sentence="") for p in found]


def _problems(exercise: Exercise, case: Case, ranks: Ranks) -> list[Problem]:
    found = []
    if exercise.target is not None:
        targets = [exercise.target(rank, case) for rank in range(case.world_size)]
        rows = {
            "messages": ([r.messages for r in ranks], [t.messages for t in targets]),
            "bytes": ([r.num_bytes for r in ranks], [t.num_bytes for t in targets]),
            "rounds": ([r.operations for r in ranks], [t.operations for t in targets]),
        }
        hub = _bottleneck(ranks, targets)
        found += [_by_rank(row, *pair, exercise, case, ranks, hub) for row, pair in rows.items()]
        found.append(_peers(exercise, case, ranks, targets, hub))
    if exercise.total is not None:
        target = exercise.total(case)
        sums = {
            "messages": (sum(r.messages for r in ranks), target.messages),
            "bytes": (sum(r.num_bytes for r in ranks), target.num_bytes),
            "rounds": (max(r.operations for r in ranks), target.operations),
        }
        found += [_together(row, *pair, exercise, case) for row, pair in sums.items()]
    return [problem for problem in found if problem is not None]


def _by_rank(
    row: str, spent: list[int], due: list, exercise: Exercise, case: Case, ranks: Ranks, hub: str
) -> Problem | None:
    if not any(_differs(s, d, exercise, case) for s, d in zip(spent, due)):
        return None
    sentence = f"{where(case, exercise)}: {counts(spent)}, where {counts(due)} is the target"
    if row == "messages":
        look = _messages_look(spent, due) or hub
    elif row == "bytes":
        look = _bytes_look(spent, due, exercise, case, ranks)
    else:
        look = _rounds_look(spent, due, ranks)
    sentence += look and f": {look}"
    return Problem(row, f"{counts(spent)}, not {counts(due)}", sentence, named=bool(look))


def _differs(spent: int, due: int | None, exercise: Exercise, case: Case) -> bool:
    if due is None or spent == due:
        return False
    # An empty chunk may travel as an empty message, or not at all.
    empty_chunks = exercise.chunked and case.size < case.world_size
    return spent > due or not empty_chunks


def counts(numbers: list) -> str:
    """``3`` where all ranks have it, ``3 1 1 1`` by rank where they differ."""
    return str(numbers[0]) if len(set(numbers)) == 1 else " ".join(map(str, numbers))


def _messages_look(spent: list[int], due: list[int]) -> str:
    if not any(spent):
        return "nothing was sent"
    differences = {s - d for s, d in zip(spent, due)}
    if differences == {1}:
        return "one step too many"
    if differences == {-1}:
        return "one step too few"
    if all(s == 2 * d for s, d in zip(spent, due)):
        return "twice as many as needed"
    return ""


def _bytes_look(
    spent: list[int], due: list[int], exercise: Exercise, case: Case, ranks: Ranks
) -> str:
    whole = 4 * case.size
    messages = [outcome.messages for outcome in ranks]
    all_whole = all(s == whole * m > d for s, m, d in zip(spent, messages, due))
    if exercise.chunked and any(messages) and all_whole:
        return "the whole tensor is sent in each message, where a chunk is due"
    if any(spent) and all(s == 2 * d for s, d in zip(spent, due)):
        return "twice as many as needed"
    return ""


def _rounds_look(spent: list[int], due: list[int], ranks: Ranks) -> str:
    messages = [outcome.messages for outcome in ranks]
    if all(s == 2 * d == 2 * m for s, d, m in zip(spent, due, messages)):
        return "each rank sends and receives one after the other; comm.exchange does both at once"
    return ""


def _bottleneck(ranks: Ranks, targets: list[Target]) -> str:
    """The words for ranks that all send to one, unless that is what they have to do."""
    hub = _hub([set(outcome.bytes_to) for outcome in ranks])
    if hub is None or hub == _hub([target.peers for target in targets]):
        return ""
    return f"all send to rank {hub}, which becomes the bottleneck"


def _hub(peers: list) -> int | None:
    """The one rank that each other one sends to; of two ranks, none."""
    P = len(peers)
    for hub in range(P if P > 2 else 0):
        if all(peers[rank] == {hub} for rank in range(P) if rank != hub):
            return hub
    return None


def _peers(
    exercise: Exercise, case: Case, ranks: Ranks, targets: list[Target], hub: str
) -> Problem | None:
    P = case.world_size
    for rank, (outcome, target) in enumerate(zip(ranks, targets)):
        stray = set() if target.peers is None else set(outcome.bytes_to) - target.peers
        if not stray:
            continue
        allowed = ", ".join(map(str, sorted(target.peers))) or "none"
        sentence = (
            f"{where(case, exercise)}, rank {rank} sends to {_ranks(stray)}; allowed: {allowed}"
        )
        left, right = (rank - 1) % P, (rank + 1) % P
        if hub:
            sentence += f": {hub}"
        elif stray == {left} and target.peers == {right}:
            sentence += ": that is the left neighbour, where the right one is due"
        elif stray == {right} and target.peers == {left}:
            sentence += ": that is the right neighbour, where the left one is due"
        return Problem("peers", "wrong", sentence)
    return None


def _ranks(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _together(
    row: str, spent: int, due: int | None, exercise: Exercise, case: Case
) -> Problem | None:
    if not _differs(spent, due, exercise, case):
        return None
    who = "the busiest rank" if row == "rounds" else "all ranks together"
    sentence = f"{where(case, exercise)}, {who}: {spent}, where {due} is the target"
    if not spent:
        sentence += ": nothing was sent"
    elif row == "messages" and spent == due + 1:
        sentence += ": one message too many (does a rank send to itself, or get it twice?)"
    return Problem(row, f"{spent}, not {due}", sentence, named=row == "messages")
