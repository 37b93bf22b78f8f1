"""The words of a deadlock: who waits for whom, in which operation, at which line."""

from labkit.comm.board import RECV_ANY, Board, Waiting


def cycle_among(waits: dict[int, list[Waiting]]) -> list[int]:
    """A cycle of ranks in which each waits for the next; empty when there is none."""
    for start in waits:
        path: list[int] = []
        rank = start
        while rank in waits and waits[rank] and rank not in path:
            path.append(rank)
            rank = next((w.peer for w in waits[rank] if w.peer in waits), waits[rank][0].peer)
        if rank in path:
            return path[path.index(rank) :]
    return []


def explain(board: Board, stuck: list[int]) -> str:
    """Sentences a learner can act on: who waits for whom, where, the cycle or the missing rank.

    Args:
        board: a copy of the board, taken while nothing moved.
        stuck: the ranks that cannot go on.
    """
    waits = {rank: board.waits(rank) for rank in stuck}
    lines = []
    cycle = cycle_among(waits)
    missing = sorted({w.peer for rank in stuck for w in waits[rank] if w.peer not in waits})
    if cycle:
        chain = " -> ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        lines.append(f"deadlock: {chain}, each waits for the next, so none can go on.")
    for peer in missing:
        waiting = [f"rank {r}" for r in stuck if any(w.peer == peer for w in waits[r])]
        verb = "waits" if len(waiting) == 1 else "wait"
        lines.append(
            f"rank {peer} has returned and never came: {', '.join(waiting)} {verb} for it."
        )
    for rank in stuck:
        op, location = waits[rank][0].op, board.ranks[rank]["location"].decode()
        joint = " or " if waits[rank][0].any_of else " and "
        needs = joint.join(f"rank {wait.peer} {wait.what}" for wait in waits[rank])
        lines.append(f"  rank {rank} is in {op}, waiting for {needs}, at {location}")
    if sequences := board.compared(*sorted({*stuck, *missing})):
        lines.append(sequences.lstrip())
        lines.append(
            "Next step: give every send a receive, and let all ranks call the same collectives, "
            "equally often."
        )
    else:
        lines.append(_next_step(board, cycle, waits))
    return "\n".join(lines)


def _next_step(board: Board, cycle: list[int], waits: dict[int, list[Waiting]]) -> str:
    ops = {wait.op for rank in cycle for wait in waits[rank]}
    if ops and ops <= {"recv", RECV_ANY}:
        return "Next step: all of them receive first. Let one send first, or use comm.exchange."
    if ops == {"send"}:
        return (
            "Next step: all of them send first, and a send ends only when its receive has begun. "
            "Let one receive first, or use comm.exchange."
        )
    if cycle:
        return "Next step: bring the operations of these ranks into an order in which each meets."
    return "Next step: give every send a receive, and let every rank reach every barrier."
