"""What the status board tells: which ends do not fit, who waits for whom, who can never continue.

Each rank compares its own end of a message, and its collective, right after posting them, so the
second rank finds a mismatch before any data moves. The launcher looks for a deadlock, and has it
explained, on a copy of the board.
"""

from typing import NamedTuple

import numpy as np

from labkit.comm.board import DEPTH, HISTORY, RECV, RECV_ANY, RETURNED, RUNNING, SEND, Board
from labkit.errors import MismatchError


def check_message(board: Board, side: int, source: int, destination: int) -> None:
    """MismatchError if the latest message of one end (``side``) does not fit the other end's."""
    mine = int(board.counts[side, source, destination]) - 1
    theirs = board.counts[1 - side]
    if theirs[source, destination] <= mine:
        return
    sent, expected = (
        _text(board.what[end, source, destination][mine % DEPTH]) for end in (SEND, RECV)
    )
    # The peer may be overwriting old entries meanwhile: so its counter is read again.
    if theirs[source, destination] < mine + DEPTH and sent != expected:
        sender, receiver = (_text(board.ranks[rank]["location"]) for rank in (source, destination))
        raise MismatchError(
            f"message {mine + 1} from rank {source} to rank {destination} does not fit:\n"
            f"  rank {source} sends {sent}, at {sender}\n"
            f"  rank {destination} receives into {expected}, at {receiver}\n"
            "Next step: give both ends the same shape and dtype."
        )


def check_collective(board: Board, rank: int) -> None:
    """MismatchError if another rank differs in the collective that ``rank`` has announced."""
    number = int(board.collectives[rank])
    index = (number - 1) % HISTORY
    announced = board.announced[rank, index]
    # The counters first: a rank writes its entry before its counter.
    for other, count in enumerate(board.collectives.tolist()):
        if count < number or board.announced[other, index] == announced:
            continue
        # The other rank may be overwriting it meanwhile.
        if board.collectives[other] < number + HISTORY - 1:
            pair = sorted((rank, other))
            lines = [f"rank {pair[0]} and rank {pair[1]} call different collectives:"]
            for one in pair:
                is_latest = board.collectives[one] == number
                at = f", at {_text(board.ranks[one]['location'])}" if is_latest else ""
                lines.append(f"  rank {one}: {latest_collectives(board, one, number)}{at}")
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
        for rank, slot in enumerate(board.ranks):
            check_collective(board, rank)
            if slot["op"] and slot["dst"] >= 0:
                check_message(board, SEND, rank, int(slot["dst"]))
            if slot["op"] and slot["src"] >= 0:
                check_message(board, RECV, int(slot["src"]), rank)
    except MismatchError as error:
        return str(error)
    return ""


def latest_collectives(board: Board, rank: int, up_to: int | None = None) -> str:
    """The latest collectives of a rank: ``1. broadcast float32 [4], 2. barrier``."""
    announced, count = board.ranks[rank]["announced"], int(board.collectives[rank])
    last = count if up_to is None else min(up_to, count)
    first = max(0, last - 3, count - HISTORY)
    shown = [f"{n + 1}. {_text(announced[n % HISTORY])}" for n in range(first, last)]
    return ", ".join(["..."] * (first > 0) + shown) or "none"


def uneven_collectives(board: Board, *ranks: int) -> str:
    """Lines with the latest collectives of some ranks; empty if all called the same number."""
    if len({int(board.collectives[rank]) for rank in ranks}) < 2:
        return ""
    lines = ["", "The latest collectives that each rank has called:"]
    lines += [f"  rank {rank}: {latest_collectives(board, rank)}" for rank in ranks]
    return "\n".join(lines)


class Waiting(NamedTuple):
    """One reason why a rank cannot continue: it waits for ``peer``, or ``any_of`` several.

    ``what`` completes the sentence: "to send float32 [4]", "at barrier number 2".
    """

    peer: int
    what: str
    any_of: bool = False


def waits(board: Board, rank: int) -> list[Waiting]:
    """What the rank is waiting for at this moment; empty when it can continue by itself."""
    slot = board.ranks[rank]
    op, dst, src = _text(slot["op"]), int(slot["dst"]), int(slot["src"])
    if slot["state"] != RUNNING or not op:
        return []
    if op == RECV_ANY and src < 0:
        sources = np.flatnonzero(board.wanted[rank]).tolist()
        has_come = board.senders(rank, sources)
        return [] if has_come else [Waiting(source, "to send", True) for source in sources]
    if dst < 0 and src < 0:
        number, came = int(slot["meetings"]), board.ranks["meetings"]
        missing = np.flatnonzero(came < number).tolist()
        return [Waiting(peer, f"at {op} number {number}") for peer in missing]
    found = []
    ends = ((SEND, rank, dst, dst, "to receive"), (RECV, src, rank, src, "to send"))
    for side, source, destination, peer, verb in ends:
        counts = board.counts[:, source, destination]
        if peer >= 0 and counts[side] > counts[1 - side]:
            what = board.what[side, source, destination][(int(counts[side]) - 1) % DEPTH]
            found.append(Waiting(peer, f"{verb} {_text(what)}"))
    return found


def takes_part(board: Board, rank: int, peer: int) -> bool:
    """Whether ``rank`` is in an operation that ``peer`` takes part in."""
    slot = board.ranks[rank]
    if slot["op"] == RECV_ANY.encode() and slot["src"] < 0:
        return bool(board.wanted[rank, peer])
    peers = {int(slot["dst"]), int(slot["src"])}
    return bool(slot["op"]) and (peers == {-1} or peer in peers)


def stuck_ranks(board: Board) -> list[int]:
    """The ranks that can never continue, whatever the others do.

    A rank is stuck when it waits for a rank that has returned, or for another stuck rank; in
    ``recv_any``, when this holds for all its sources. (Who waits for a lost rank gets an error.)
    """
    ended = set(np.flatnonzero(board.ranks["state"] == RETURNED).tolist())
    reasons = {rank: waits(board, rank) for rank in range(board.world_size)}

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
    for rank in reasons:
        path: list[int] = []
        while rank in reasons and rank not in path:
            path.append(rank)
            peers = [waiting.peer for waiting in reasons[rank]]
            rank = next((peer for peer in peers if peer in reasons), peers[0])
        if rank in path:
            return path[path.index(rank) :]
    return []


def explain_deadlock(board: Board, stuck: list[int]) -> str:
    """Explain who waits for whom, at which line, the cycle or the missing rank, the next step.

    ``board`` is a copy, taken while nothing moved; ``stuck`` are its ``stuck_ranks``.
    """
    reasons = {rank: waits(board, rank) for rank in stuck}
    cycle, lines = find_cycle(reasons), []
    if cycle:
        chain = " -> ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        lines.append(f"deadlock: {chain}, each waits for the next, so none can go on.")
    missing = sorted({w.peer for found in reasons.values() for w in found} - reasons.keys())
    for peer in missing:
        waiting = [f"rank {r}" for r in stuck if any(w.peer == peer for w in reasons[r])]
        verb = "waits" if len(waiting) == 1 else "wait"
        lines.append(f"rank {peer} has returned, but {', '.join(waiting)} still {verb} for it.")
    for rank in stuck:
        lines.append(
            f"  rank {rank} is {explain_rank(board, rank)}, at {waits_in(board, rank)[1]}"
        )
    ops = {waits_in(board, rank)[0] for rank in cycle}
    step = "give every send a receive, and let all ranks call the same collectives."
    if sequences := uneven_collectives(board, *sorted({*stuck, *missing})):
        lines.append(sequences.lstrip())
    elif ops and ops <= {"recv", RECV_ANY}:
        step = "all of them receive first. Let one send first, or use comm.exchange."
    elif ops == {"send"}:
        step = (
            "all of them send first, and a send ends only when its receive has begun. "
            "Let one receive first, or use comm.exchange."
        )
    elif cycle:
        step = "order the operations of these ranks so that each meets its peer."
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
    return (op := _text(slot["op"])), _text(slot["location"]) if op else ""


def _text(field: bytes) -> str:
    # A long text is cut to its field, maybe within a character.
    return field.decode(errors="replace")
