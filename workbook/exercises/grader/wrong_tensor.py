"""What a wrong tensor is made of, and the mistake that explains it.

The inputs are random, so one linear solve tells how a value was put together: "rank 0's chunk 1
once, rank 2's chunk 1 twice". Comparing that with what should be in it names the mistake.

Symbols: P ranks.
"""

import torch

from workbook.exercises.grader.words import Mistake

# Values that were rounded to bfloat16 after every addition are still recognised.
_ROUNDED = 1e-2
Piece = tuple[int, int]  # (rank, chunk); chunk 0 where a tensor is not cut
Contents = dict[Piece, float]  # how many times each piece is in a value


def contents(value: torch.Tensor, basis: dict[Piece, torch.Tensor], chunk: int) -> Contents | None:
    """Return how many times each piece is in ``value``, or None if that cannot be told.

    Args:
        value: [n].
        basis: piece -> [n]; pieces of another shape are left out.
        chunk: the only chunk to consider if n is too small to tell all pieces apart.
    """
    pieces = {key: piece for key, piece in basis.items() if piece.shape == value.shape}
    if len(pieces) > value.numel():
        pieces = {key: piece for key, piece in pieces.items() if key[1] == chunk}
    if not pieces or len(pieces) > value.numel():
        return None
    matrix = torch.stack([piece.double().flatten() for piece in pieces.values()], dim=1)
    target = value.double().reshape(-1, 1)
    solution = torch.linalg.lstsq(matrix, target).solution
    # Multiples of 1 / 12: whole numbers, also divided by 2, 3 or 4 ranks.
    exact = (solution * 12).round() / 12
    if not torch.allclose(matrix @ exact, target, rtol=_ROUNDED, atol=_ROUNDED):
        return None
    return {key: times for key, times in zip(pieces, exact.flatten().tolist()) if times}


def name_mistake(found: Contents, wanted: Contents, own: Piece, world_size: int) -> Mistake:
    """Return the mistake that the difference between two contents looks like; they do differ.

    Args:
        found: the contents of the value.
        wanted: the expected contents.
        own: the piece that the rank itself started with.
        world_size: P.
    """
    if found == {own: 1}:
        return Mistake("value.unchanged")
    if ratio := _ratio(found, wanted):
        return _scaled(ratio, world_size, summed=1 in wanted.values())
    foreign = sorted({chunk for _, chunk in found} - {chunk for _, chunk in wanted})
    if foreign:
        return Mistake("chunk.foreign", chunks=listed("chunk", foreign))
    if len(wanted) == 1:
        return _wrong_copy(found, wanted, own)
    return _wrong_sum(found, wanted, own)


def _ratio(found: Contents, wanted: Contents) -> float | None:
    ratios = {round(found[piece] / times, 6) for piece, times in wanted.items() if piece in found}
    return ratios.pop() if found.keys() == wanted.keys() and len(ratios) == 1 else None


def _scaled(ratio: float, world_size: int, *, summed: bool) -> Mistake:
    if summed and abs(ratio * world_size - 1) < 1e-3:
        return Mistake("sum.mean", ranks=world_size)
    return Mistake("sum.not_divided" if ratio == world_size else "sum.scaled", ratio=ratio)


def _wrong_copy(found: Contents, wanted: Contents, own: Piece) -> Mistake:
    ((due, _),) = wanted
    if [*found.values()] == [1]:
        return Mistake("copy.other_rank", found=next(iter(found))[0], wanted=due)
    if found == {own: 1, **wanted}:
        return Mistake("copy.added")
    return Mistake("copy.mixed", found=_sum_of(found), wanted=due)


def _wrong_sum(found: Contents, wanted: Contents, own: Piece) -> Mistake:
    unit = next(iter(wanted.values()))
    pieces = sorted({*found, *wanted})
    excess = {p: round((found.get(p, 0) - wanted.get(p, 0)) / unit, 6) for p in pieces}
    extra = {p: times for p, times in excess.items() if times > 0}
    missing = [p for p, times in excess.items() if times == -1]
    if len(found) == 1 and own not in found and {*found.values()} <= {1, unit}:
        return Mistake("sum.overwritten", rank=next(iter(found))[0])
    if extra == {own: 1} and not missing:
        return Mistake("sum.own_twice")
    if extra and not missing:
        return Mistake("sum.twice", ranks=listed("rank", sorted({rank for rank, _ in extra})))
    if missing == [own] and not extra:
        return Mistake("sum.own_missing")
    if missing and not extra and len(missing) + len(found) == len(wanted):
        absent = listed("rank", [rank for rank, _ in missing])
        id = "sum.lacks_one" if len(missing) == 1 else "sum.lacks"
        return Mistake(id, found=_sum_of(found), absent=absent)
    return Mistake("sum.other", found=_sum_of(found), wanted=_sum_of(wanted))


def _sum_of(found: Contents) -> str:
    return " + ".join(
        f"rank {rank}" if times == 1 else f"{times:.3g} x rank {rank}"
        for (rank, _), times in sorted(found.items())
    )


def listed(noun: str, numbers: list[int]) -> str:
    """``rank 3``, or ``ranks 1, 2 and 3``."""
    *most, last = map(str, numbers)
    return f"{noun}s {', '.join(most)} and {last}" if most else f"{noun} {last}"
