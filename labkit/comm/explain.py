"""The explanation of a deadlock: who waits for whom, in which operation, at which line."""

from labkit.comm.board import RECV_ANY, Board
from labkit.comm.deadlock import Waiting, find_cycle, waits
from labkit.comm.mismatch import uneven_collectives


def explain_deadlock(board: Board, stuck: list[int]) -> str:
    """Explain who waits for whom, at which line, the cycle or the missing rank, the next step.

    ``board`` is a copy, taken while nothing moved; ``stuck`` are its ``stuck_ranks``.
    """
    reasons = {rank: waits(board, rank) for rank in stuck}
    cycle = find_cycle(reasons)
    missing = sorted({w.peer for rank in stuck for w in reasons[rank]} - reasons.keys())
    lines = []
    if cycle:
        chain = " -> ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        lines.append(f"deadlock: {chain}, each waits for the next, so none can go on.")
    for peer in missing:
        waiting = [f"rank {r}" for r in stuck if any(w.peer == peer for w in reasons[r])]
        verb = "waits" if len(waiting) == 1 else "wait"
        lines.append(f"rank {peer} has returned, but {', '.join(waiting)} still {verb} for it.")
    for rank in stuck:
        location = board.ranks[rank]["location"].decode()
        lines.append(f"  rank {rank} is {explain_rank(board, rank)}, at {location}")
    if sequences := uneven_collectives(board, *sorted({*stuck, *missing})):
        lines.append(sequences.lstrip())
        lines.append(
            "Next step: give every send a receive, and let all ranks call the same collectives, "
            "equally often."
        )
    else:
        lines.append(_next_step(cycle, reasons))
    return "\n".join(lines)


def explain_rank(board: Board, rank: int) -> str:
    """What a rank is doing: ``in recv, waiting for rank 1 to send float32 [4]``, for example."""
    op = board.ranks[rank]["op"].decode()
    if not op:
        return "in its own code"
    reasons = waits(board, rank)
    return f"in {op}, waiting for {_needs(reasons)}" if reasons else f"in {op}"


def _needs(reasons: list[Waiting]) -> str:
    joint = " or " if reasons[0].any_of else " and "
    return joint.join(f"rank {wait.peer} {wait.what}" for wait in reasons)


def _next_step(cycle: list[int], reasons: dict[int, list[Waiting]]) -> str:
    ops = {wait.op for rank in cycle for wait in reasons[rank]}
    if ops and ops <= {"recv", RECV_ANY}:
        return "Next step: all of them receive first. Let one send first, or use comm.exchange."
    if ops == {"send"}:
        return (
            "Next step: all of them send first, and a send ends only when its receive has begun. "
            "Let one receive first, or use comm.exchange."
        )
    if cycle:
        return "Next step: order the operations of these ranks so that each meets its peer."
    return "Next step: give every send a receive, and let every rank reach every barrier."
