"""Read the status board: which ends do not fit, who waits for whom, who can never continue.

Each rank compares its own end of a message, and its collective, right after posting them, so the
second rank finds a mismatch before any data moves. The launcher looks for a deadlock, and has it
explained, on a copy of the board.
"""

from typing import NamedTuple

import numpy as np

from labkit.engine.comm.board import DEPTH, HISTORY, RECV, RECV_ANY, RETURNED, RUNNING, SEND, Board
from labkit.engine.errors import MismatchError


def check_message(board: Board, side: int, source: int, destination: int) -> None:
    """Raise MismatchError if the latest message of one end (``side``) does not fit the other's."""
    number = int(board.counts[side, source, destination])
    peer_counts = board.counts[1 - side]
    if peer_counts[source, destination] < number:
        return
    index = (number - 1) % DEPTH
    sent = _text(board.what[SEND, source, destination][index])
    expected = _text(board.what[RECV, source, destination][index])
    # The peer may be overwriting old entries meanwhile: so its counter is read again.
    if peer_counts[source, destination] < number + DEPTH - 1 and sent != expected:
        locations = board.ranks["location"]
        raise MismatchError(
            f"message {number} from rank {source} to rank {destination} does not fit:\n"
            f"  rank {source} sends {sent}, at {_text(locations[source])}\n"
            f"  rank {destination} receives into {expected}, at {_text(locations[destination])}\n"
            "Next step: give both ends the same shape and dtype."
        )


def check_collective(board: Board, rank: int) -> None:
    """Raise MismatchError if another rank has announced a different collective than ``rank``."""
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
            for caller in pair:
                line = f"  rank {caller}: {latest_collectives(board, caller, number)}"
                if board.collectives[caller] == number:
                    line += f", at {_text(board.ranks[caller]['location'])}"
                lines.append(line)
            lines.append(
                "Next step: let all ranks call the same collectives in the same order, with "
                "tensors of one shape and dtype."
            )
            raise MismatchError("\n".join(lines))


def find_mismatch(board: Board) -> str:
    """Explain why two ranks that are in an operation now do not fit; empty if all may fit.

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
    """List the latest collectives of a rank: ``1. broadcast float32 [4], 2. barrier``."""
    announced = board.ranks[rank]["announced"]
    count = int(board.collectives[rank])
    end = count if up_to is None else min(up_to, count)
    start = max(0, end - 3, count - HISTORY)
    entries = ["..."] if start > 0 else []
    entries += [f"{n + 1}. {_text(announced[n % HISTORY])}" for n in range(start, end)]
    return ", ".join(entries) or "none"


def uneven_collectives(board: Board, *ranks: int) -> str:
    """Return lines with the latest collectives of ``ranks``; empty if all called equally many."""
    if len({int(board.collectives[rank]) for rank in ranks}) < 2:
        return ""
    lines = ["", "The latest collectives that each rank has called:"]
    lines += [f"  rank {rank}: {latest_collectives(board, rank)}" for rank in ranks]
    return "\n".join(lines)


class Waiting(NamedTuple):
    """One reason why a rank cannot continue: it waits for ``peer``, or ``any_of`` several.

    ``action`` completes the sentence: "to send float32 [4]", "at barrier number 2".
    """

    peer: int
    action: str
    any_of: bool = False


def waits(board: Board, rank: int) -> list[Waiting]:
    """List what the rank is waiting for now; empty when it can continue by itself."""
    slot = board.ranks[rank]
    op = _text(slot["op"])
    dst, src = int(slot["dst"]), int(slot["src"])
    if slot["state"] != RUNNING or not op:
        return []
    if op == RECV_ANY and src < 0:
        sources = np.flatnonzero(board.wanted[rank]).tolist()
        if board.senders(rank, sources):
            return []
        return [Waiting(source, "to send", any_of=True) for source in sources]
    if dst < 0 and src < 0:
        number = int(slot["joint"])
        missing = np.flatnonzero(board.ranks["joint"] < number).tolist()
        return [Waiting(peer, f"at {op} number {number}") for peer in missing]
    reasons = []
    if dst >= 0:
        sent, received = board.counts[:, rank, dst]
        if sent > received:
            tensor = _text(board.what[SEND, rank, dst][(int(sent) - 1) % DEPTH])
            reasons.append(Waiting(dst, f"to receive {tensor}"))
    if src >= 0:
        sent, received = board.counts[:, src, rank]
        if received > sent:
            tensor = _text(board.what[RECV, src, rank][(int(received) - 1) % DEPTH])
            reasons.append(Waiting(src, f"to send {tensor}"))
    return reasons


def takes_part(board: Board, rank: int, peer: int) -> bool:
    """Tell whether ``rank`` is in an operation that ``peer`` takes part in."""
    slot = board.ranks[rank]
    if slot["op"] == RECV_ANY.encode() and slot["src"] < 0:
        return bool(board.wanted[rank, peer])
    peers = {int(slot["dst"]), int(slot["src"])}
    return bool(slot["op"]) and (peers == {-1} or peer in peers)


def stuck_ranks(board: Board) -> list[int]:
    """Find the ranks that can never continue, whatever the others do.

    A rank is stuck when it waits for a rank that has returned, or for another stuck rank; in
    ``recv_any``, when this holds for all its sources. (Who waits for a lost rank gets an error.)
    """
    ended = set(np.flatnonzero(board.ranks["state"] == RETURNED).tolist())
    reasons = {rank: waits(board, rank) for rank in range(board.world_size)}

    def can_continue(rank: int) -> bool:
        blocked = waiting | ended
        may_come = [reason.peer not in blocked for reason in reasons[rank]]
        return any(may_come) if reasons[rank][0].any_of else all(may_come)

    # A cycle has no first member: start with all waiting ranks, remove those that can continue.
    waiting = {rank for rank in reasons if reasons[rank]}
    while freed := {rank for rank in waiting if can_continue(rank)}:
        waiting -= freed
    return sorted(waiting)


def find_cycle(reasons: dict[int, list[Waiting]]) -> list[int]:
    """Find a cycle of stuck ranks, each waiting for the next, by their reasons; empty for none."""
    for first in reasons:
        rank = first
        path: list[int] = []
        while rank in reasons and rank not in path:
            path.append(rank)
            peers = [reason.peer for reason in reasons[rank]]
            rank = next((peer for peer in peers if peer in reasons), peers[0])
        if rank in path:
            return path[path.index(rank) :]
    return []


def explain_deadlock(board: Board, stuck: list[int]) -> str:
    """Explain who waits for whom, at which line, the cycle or the missing rank, the next step.

    ``board`` is a copy, taken while nothing moved; ``stuck`` are its ``stuck_ranks``.
    """
    reasons = {rank: waits(board, rank) for rank in stuck}
    cycle = find_cycle(reasons)
    lines = []
    if cycle:
        chain = " -> ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        lines.append(f"deadlock: {chain}, each waits for the next, so none can go on.")
    waiting_for: dict[int, list[str]] = {}  # by rank that has returned: who waits for it
    for rank in stuck:
        for peer in {reason.peer for reason in reasons[rank]}:
            # (One that is neither stuck nor has returned is only slow.)
            if board.ranks["state"][peer] == RETURNED:
                waiting_for.setdefault(peer, []).append(f"rank {rank}")
    for peer, names in sorted(waiting_for.items()):
        verb = "waits" if len(names) == 1 else "wait"
        lines.append(f"rank {peer} has returned, but {', '.join(names)} still {verb} for it.")
    for rank in stuck:
        _, location = current_operation(board, rank)
        lines.append(f"  rank {rank} is {explain_rank(board, rank)}, at {location}")
    ops = {current_operation(board, rank)[0] for rank in cycle}
    step = "give every send a receive, and let all ranks call the same collectives."
    if sequences := uneven_collectives(board, *sorted({*stuck, *waiting_for})):
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
    """Say what a rank is doing: ``in recv, waiting for rank 1 to send float32 [4]``."""
    op, _ = current_operation(board, rank)
    if not op:
        return "in its own code"
    reasons = waits(board, rank)
    if not reasons:
        return f"in {op}"
    conjunction = " or " if reasons[0].any_of else " and "
    needs = conjunction.join(f"rank {reason.peer} {reason.action}" for reason in reasons)
    return f"in {op}, waiting for {needs}"


def current_operation(board: Board, rank: int) -> tuple[str, str]:
    """Return the operation that a rank is in, and the line that called it; "" for none."""
    slot = board.ranks[rank]
    op = _text(slot["op"])
    return op, _text(slot["location"]) if op else ""


def _text(field: bytes) -> str:
    # A long text is cut to its field, maybe within a character.
    return field.decode(errors="replace")
