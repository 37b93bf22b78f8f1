"""The explanation of a deadlock: who waits for whom, in which operation, at which line."""

import numpy as np

from labkit.comm.board import QUEUED, RECV, RECV_ANY, RUNNING, SEND, Board
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
        _, location = waits_in(board, rank)
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
    op, _ = waits_in(board, rank)
    if not op:
        return "in its own code"
    reasons = waits(board, rank)
    doing = f"in {op}, waiting for {_needs(reasons)}" if reasons else f"in {op}"
    resting = board.ranks[rank]["resting"].decode()
    return f"{doing} (it was queued, and the rank waits for it in {resting})" if resting else doing


def waits_in(board: Board, rank: int) -> tuple[str, str]:
    """The operation that a rank is in, and the line that called it; empty if it is in none.

    Of a rank that waits for what it has queued, this is the first operation that has not ended.
    """
    slot = board.ranks[rank]
    which = "head_" if slot["resting"] else ""
    op, where = slot[f"{which}op"].decode(), slot[f"{which}location"].decode(errors="replace")
    return op, where if op else ""


def explain_queues(board: Board) -> list[str]:
    """Lines on what was queued and has not ended: by rank, and by edge whose ends differ.

    A rank on whose transport nothing is queued, or that waits in an operation, is left out: its
    own line says it.
    """
    lines = []
    for rank, slot in enumerate(board.ranks):
        queued, ended = int(slot["queued"]), int(slot["ended"])
        if slot["state"] == RUNNING and ended < queued:
            line = f"rank {rank} has queued {queued} operations, of which {ended} have ended"
            if not slot["resting"] and (op := slot["head_op"].decode()):
                peers = [int(peer) for peer in (slot["head_dst"], slot["head_src"]) if peer >= 0]
                names = " and ".join(f"rank {peer}" for peer in dict.fromkeys(peers))
                line += f"; the next is {op} with {names}, at {slot['head_location'].decode()}"
            lines.append(f"{line}.")
    for source, destination in np.argwhere(board.counts[SEND] != board.counts[RECV]):
        lines += _uneven(board, int(source), int(destination))
    return lines


def _uneven(board: Board, source: int, destination: int) -> list[str]:
    """A line on an edge of which one end has queued more operations than the other has posted."""
    sends, recvs = (int(board.counts[side, source, destination]) for side in (SEND, RECV))
    side, rank = (SEND, source) if sends > recvs else (RECV, destination)
    more, fewer = max(sends, recvs), min(sends, recvs)
    if not board.ranks[rank]["queued"]:
        return []
    peer = destination if side == SEND else source
    one, other = ("sends to", "receives") if side == SEND else ("receives from", "sends")
    what = "not known any more"
    if board.late is not None and more - fewer <= QUEUED:
        late = board.late[side, source, destination]
        what, where = (late[name][fewer % QUEUED].decode() for name in ("what", "where"))
        what = f"{what}, at {where}"
    return [
        f"rank {rank} has queued {more} {one} rank {peer}, which has posted {fewer} {other} for "
        f"them. The first without a counterpart is number {fewer + 1}: {what}."
    ]


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
