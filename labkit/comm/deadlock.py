"""What the status board tells: which ends do not fit, who waits for whom, who can never continue.

Each rank compares its own end of a message, and its collective, right after posting them, so the
second rank finds a mismatch before any data moves. The launcher looks for a deadlock, and has it
explained, on a copy of the board.
"""

from dataclasses import dataclass

import numpy as np

from labkit.comm.board import DEPTH, HISTORY, RECV, RECV_ANY, RETURNED, RUNNING, SEND, Board
from labkit.errors import MismatchError

# Mismatches


def check_message(board: Board, side: int, source: int, destination: int) -> None:
    """Compare the latest message that one end (``side``) of an edge has posted with the other's.

    Raises:
        MismatchError: the other end has posted its part, with another shape or dtype.
    """
    mine = int(board.counts[side, source, destination]) - 1
    theirs = board.counts[1 - side]
    if theirs[source, destination] <= mine:
        return
    sent, expected = (
        board.what[end, source, destination][mine % DEPTH].decode(errors="replace")
        for end in (SEND, RECV)
    )
    # The peer may be overwriting old entries meanwhile: so its counter is read again.
    if theirs[source, destination] < mine + DEPTH and sent != expected:
        sender, receiver = (
            board.ranks[rank]["location"].decode(errors="replace")
            for rank in (source, destination)
        )
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
            lines = [f"rank {first} and rank {second} call different collectives:"]
            for one in (first, second):
                where = board.ranks[one]["location"].decode(errors="replace")
                is_latest = where and board.collectives[one] == mine + 1
                latest = latest_collectives(board, one, mine + 1)
                lines.append(f"  rank {one}: {latest}" + (f", at {where}" if is_latest else ""))
            lines.append(
                "Next step: let all ranks call the same collectives in the same order, with "
                "tensors of one shape and dtype."
            )
            raise MismatchError("\n".join(lines))


def find_mismatch(board: Board) -> str:
    """Why two ranks that are in an operation at this moment do not fit; empty if all may.

    (Ranks of other hosts become known only after each rank has looked for itself.)
    """
    try:
        for rank in range(board.world_size):
            check_collective(board, rank)
            slot = board.ranks[rank]
            dst, src = int(slot["dst"]), int(slot["src"])
            if slot["op"] and dst >= 0:
                check_message(board, SEND, rank, dst)
            if slot["op"] and src >= 0:
                check_message(board, RECV, src, rank)
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


# Deadlocks


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
    op = slot["op"].decode()
    if slot["state"] != RUNNING or not op:
        return []
    dst, src = int(slot["dst"]), int(slot["src"])
    if op == RECV_ANY and src < 0:
        sources = [int(source) for source in np.flatnonzero(board.wanted[rank])]
        if board.senders(rank, sources):
            return []
        what = f"to send {slot['any_what'].decode()}"
        return [Waiting(rank, source, op, what, any_of=True) for source in sources]
    if dst < 0 and src < 0:
        number, came = int(slot["meetings"]), board.ranks["meetings"]
        missing = (peer for peer in range(board.world_size) if came[peer] < number)
        return [Waiting(rank, peer, op, f"at {op} number {number}") for peer in missing]
    found = []
    ends = ((SEND, rank, dst, dst, "to receive"), (RECV, src, rank, src, "to send"))
    for side, source, destination, peer, verb in ends:
        if peer >= 0:
            counts = board.counts[:, source, destination]
            if counts[side] > counts[1 - side]:
                what = board.what[side, source, destination][(int(counts[side]) - 1) % DEPTH]
                found.append(Waiting(rank, peer, op, f"{verb} {what.decode()}"))
    return found


def takes_part(board: Board, rank: int, peer: int) -> bool:
    """Whether ``rank`` is in an operation that ``peer`` takes part in."""
    slot = board.ranks[rank]
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

    def can_continue(rank: int) -> bool:
        hopes = [reason.peer not in waiting | ended for reason in reasons[rank]]
        return any(hopes) if reasons[rank][0].any_of else all(hopes)

    # A cycle has no first member: start with all waiting ranks, remove those that can continue.
    waiting = {rank for rank, found in reasons.items() if found}
    while freed := {rank for rank in waiting if can_continue(rank)}:
        waiting -= freed
    return sorted(waiting)


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


# Explanations


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
    sequences = uneven_collectives(board, *sorted({*stuck, *missing}))
    ops = {wait.op for rank in cycle for wait in reasons[rank]}
    if sequences:
        lines.append(sequences.lstrip())
        step = (
            "give every send a receive, and let all ranks call the same collectives, "
            "equally often."
        )
    elif ops and ops <= {"recv", RECV_ANY}:
        step = "all of them receive first. Let one send first, or use comm.exchange."
    elif ops == {"send"}:
        step = (
            "all of them send first, and a send ends only when its receive has begun. "
            "Let one receive first, or use comm.exchange."
        )
    elif cycle:
        step = "order the operations of these ranks so that each meets its peer."
    else:
        step = "give every send a receive, and let every rank reach every barrier."
    return "\n".join([*lines, f"Next step: {step}"])


def explain_rank(board: Board, rank: int) -> str:
    """What a rank is doing: ``in recv, waiting for rank 1 to send float32 [4]``, for example."""
    op, _ = waits_in(board, rank)
    if not op:
        return "in its own code"
    if not (reasons := waits(board, rank)):
        return f"in {op}"
    joint = " or " if reasons[0].any_of else " and "
    needs = joint.join(f"rank {wait.peer} {wait.what}" for wait in reasons)
    return f"in {op}, waiting for {needs}"


def waits_in(board: Board, rank: int) -> tuple[str, str]:
    """The operation that a rank is in, and the line that called it; empty if it is in none."""
    slot = board.ranks[rank]
    op, where = slot["op"].decode(), slot["location"].decode(errors="replace")
    return op, where if op else ""
