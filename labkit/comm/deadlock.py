"""Finding a deadlock on the board: who waits for whom, and which ranks can never continue.

The launcher calls this on a copy of the board; ``labkit.comm.explain`` writes the explanation.
"""

from dataclasses import dataclass

import numpy as np

from labkit.comm.board import DEPTH, RECV, RECV_ANY, RETURNED, RUNNING, SEND, Board


@dataclass(frozen=True)
class Waiting:
    """One reason why ``rank`` cannot continue: in ``op`` it waits for ``peer``.

    ``what`` completes the sentence: "to send float32 [4]", "at barrier number 2". With ``any_of``,
    ``rank`` waits for any one of several peers, and this is one of them.
    """

    rank: int
    peer: int
    op: str
    what: str
    any_of: bool = False


def waits(board: Board, rank: int) -> list[Waiting]:
    """What the rank is waiting for at this moment; empty when it can continue by itself."""
    slot = board.ranks[rank]
    if slot["state"] == RUNNING and slot["resting"]:
        return _waits_for_head(board, rank)
    op = slot["op"].decode()
    if slot["state"] != RUNNING or not op:
        return []
    dst, src = int(slot["dst"]), int(slot["src"])
    if op == RECV_ANY and src < 0:
        return _waits_for_any(board, rank)
    if dst < 0 and src < 0:
        number, came = int(slot["meetings"]), board.ranks["meetings"]
        missing = (peer for peer in range(board.world_size) if came[peer] < number)
        return [Waiting(rank, peer, op, f"at {op} number {number}") for peer in missing]
    found = []
    if dst >= 0 and (what := _unmatched(board, SEND, rank, dst)):
        found.append(Waiting(rank, dst, op, f"to receive {what}"))
    if src >= 0 and (what := _unmatched(board, RECV, src, rank)):
        found.append(Waiting(rank, src, op, f"to send {what}"))
    return found


def _waits_for_head(board: Board, rank: int) -> list[Waiting]:
    """What the first operation waits for that ``rank`` has queued and that has not ended."""
    if board.gave_up():
        # Its queue is about to be aborted.
        return []
    slot = board.ranks[rank]
    op, dst, src = slot["head_op"].decode(), int(slot["head_dst"]), int(slot["head_src"])
    found = []
    if dst >= 0 and not _comes_to(board, RECV, rank, dst):
        found.append(Waiting(rank, dst, op, f"to receive {slot['head_sent'].decode()}"))
    if src >= 0 and not _comes_to(board, SEND, src, rank):
        found.append(Waiting(rank, src, op, f"to send {slot['head_expected'].decode()}"))
    return found


def _comes_to(board: Board, side: int, source: int, destination: int) -> bool:
    """Whether one end (``side``) of an edge has come to the other end's first queued operation.

    A rank that waits for its own queue has come to its first operation, and to none behind that
    one. For any other rank an operation counts as soon as it is posted.
    """
    number = board.begun[1 - side, source, destination]
    peer = source if side == SEND else destination
    theirs = board.begun if board.ranks[peer]["resting"] else board.counts
    return bool(theirs[side, source, destination] >= number)


def _waits_for_any(board: Board, rank: int) -> list[Waiting]:
    sources = [int(source) for source in np.flatnonzero(board.wanted[rank])]
    if board.senders(rank, sources):
        return []
    what = f"to send {board.ranks[rank]['any_what'].decode()}"
    return [Waiting(rank, source, RECV_ANY, what, any_of=True) for source in sources]


def _unmatched(board: Board, side: int, source: int, destination: int) -> str:
    """The operation that this end of the edge has posted and the other has not; empty if none."""
    counts = board.counts[:, source, destination]
    latest = board.what[side, source, destination][(int(counts[side]) - 1) % DEPTH]
    return latest.decode() if counts[side] > counts[1 - side] else ""


def takes_part(board: Board, rank: int, peer: int) -> bool:
    """Whether ``rank`` is in an operation that ``peer`` takes part in."""
    slot = board.ranks[rank]
    if slot["resting"]:
        return peer in (int(slot["head_dst"]), int(slot["head_src"]))
    peers = int(slot["dst"]), int(slot["src"])
    if not slot["op"]:
        return False
    if peers != (-1, -1):
        return peer in peers
    return slot["op"].decode() != RECV_ANY or bool(board.wanted[rank, peer])


def stuck_ranks(board: Board) -> list[int]:
    """The ranks that can never continue, whatever the others do.

    A rank that computes may still come to any operation; a rank that has returned never will. So a
    rank is stuck when it waits for a rank that has returned, or for another stuck rank; in
    ``recv_any``, when this holds for all its sources. (A rank that waits for a lost rank gets an
    error, and is not stuck.)
    """
    everyone = range(board.world_size)
    ended = {rank for rank in everyone if board.ranks[rank]["state"] == RETURNED}
    reasons = {rank: waits(board, rank) for rank in everyone if rank not in ended}
    # A cycle has no first member: start with all waiting ranks, remove those that can continue.
    waiting = {rank for rank, found in reasons.items() if found}
    freed = True
    while freed:
        freed = {rank for rank in waiting if _can_continue(reasons[rank], waiting | ended)}
        waiting -= freed
    return sorted(waiting)


def _can_continue(reasons: list[Waiting], hopeless: set[int]) -> bool:
    hopes = [reason.peer not in hopeless for reason in reasons]
    return any(hopes) if reasons[0].any_of else all(hopes)


def find_cycle(reasons: dict[int, list[Waiting]]) -> list[int]:
    """A cycle of stuck ranks, each waiting for the next, by their reasons; empty for none."""
    for start in reasons:
        path: list[int] = []
        rank = start
        while rank in reasons and reasons[rank] and rank not in path:
            path.append(rank)
            rank = next(
                (w.peer for w in reasons[rank] if w.peer in reasons), reasons[rank][0].peer
            )
        if rank in path:
            return path[path.index(rank) :]
    return []
