"""Checks that both ends of a message agree, and that all ranks call the same collectives.

Each rank compares right after posting its own end on the board, so the second rank finds a
mismatch before any data moves. The other rank may be overwriting old entries meanwhile: after
reading an entry, the reader checks the counter again, to see whether the entry was still valid.
"""

from labkit.comm.board import DEPTH, HISTORY, QUEUED, RECV, SEND, Board
from labkit.errors import MismatchError


def check_message(
    board: Board, side: int, source: int, destination: int, queued: bool = False
) -> None:
    """Compare the latest message posted by one end (``side``) of an edge with the other end's.

    Args:
        queued: both ends only queue their operations, and may be up to QUEUED messages apart.

    Raises:
        MismatchError: the other end has posted its part, with another shape or dtype.
    """
    mine = int(board.counts[side, source, destination]) - 1
    theirs = board.counts[1 - side]
    if theirs[source, destination] <= mine:
        return
    late = board.late if queued else None
    described, depth = (board.what, DEPTH) if late is None else (late["what"], QUEUED)
    sent, expected = (
        described[end, source, destination][mine % depth].decode(errors="replace")
        for end in (SEND, RECV)
    )
    lines = [board.ranks[rank]["location"] for rank in (source, destination)]
    if late is not None:
        lines = [late["where"][end, source, destination][mine % depth] for end in (SEND, RECV)]
    # A peer that is fewer than ``depth`` messages ahead has not begun to overwrite this entry.
    if theirs[source, destination] < mine + depth and sent != expected:
        sender, receiver = (line.decode(errors="replace") for line in lines)
        raise MismatchError(
            f"message {mine + 1} from rank {source} to rank {destination} does not fit:\n"
            f"  rank {source} sends {sent}, at {sender}\n"
            f"  rank {destination} receives into {expected}, at {receiver}\n"
            "Next step: give both ends the same shape and dtype."
        )


def check_collective(board: Board, rank: int) -> None:
    """Compare the collective that ``rank`` has just announced with the other ranks'.

    Raises:
        MismatchError: another rank has called a different one, or with another tensor.
    """
    mine = int(board.collectives[rank]) - 1
    for other in range(board.world_size):
        if other == rank or board.collectives[other] <= mine:
            continue
        what, theirs = (board.ranks[r]["announced"][mine % HISTORY] for r in (rank, other))
        is_overwritten = board.collectives[other] >= mine + HISTORY
        if theirs != what and not is_overwritten:
            first, second = sorted((rank, other))
            raise MismatchError(
                f"rank {first} and rank {second} call different collectives:\n"
                f"  rank {first}: {latest_collectives(board, first, mine + 1)}"
                f"{_place(board, first, mine + 1)}\n"
                f"  rank {second}: {latest_collectives(board, second, mine + 1)}"
                f"{_place(board, second, mine + 1)}\n"
                "Next step: let all ranks call the same collectives in the same order, with "
                "tensors of one shape and dtype."
            )


def _place(board: Board, rank: int, number: int) -> str:
    """The line that called collective ``number``, if it is the rank's latest."""
    location = board.ranks[rank]["location"].decode(errors="replace")
    return f", at {location}" if location and board.collectives[rank] == number else ""


def find_mismatch(board: Board) -> str:
    """Why two ranks that are in an operation at this moment do not fit; empty if all may.

    Each rank looks for itself when it posts an operation. Ranks of other hosts become known only
    later: then this finds it.
    """
    try:
        for rank in range(board.world_size):
            check_collective(board, rank)
            slot = board.ranks[rank]
            dst, src = int(slot["dst"]), int(slot["src"])
            queued = bool(slot["queued"])
            if slot["op"] and dst >= 0:
                check_message(board, SEND, rank, dst, queued)
            if slot["op"] and src >= 0:
                check_message(board, RECV, src, rank, queued)
    except MismatchError as error:
        return str(error)
    return ""


def latest_collectives(board: Board, rank: int, up_to: int | None = None, length: int = 3) -> str:
    """The latest collectives of a rank: ``1. broadcast float32 [4], 2. barrier``."""
    announced, count = board.ranks[rank]["announced"], int(board.collectives[rank])
    last = count if up_to is None else min(up_to, count)
    first = max(0, last - length, count - HISTORY)
    names = (announced[index % HISTORY].decode() for index in range(first, last))
    shown = [f"{number}. {name}" for number, name in enumerate(names, first + 1)]
    return ", ".join(["..."] * (first > 0) + shown) or "none"


def uneven_collectives(board: Board, *ranks: int) -> str:
    """Lines with the latest collectives of some ranks; empty if all called the same number."""
    if len({int(board.collectives[rank]) for rank in ranks}) < 2:
        return ""
    lines = ["", "The latest collectives that each rank has called:"]
    lines += [f"  rank {rank}: {latest_collectives(board, rank)}" for rank in ranks]
    return "\n".join(lines)
