"""Judge the values: name the first wrong rank and part, and what is wrong with it.

``labkit.check.grading.wrong_tensor`` works out what a wrong tensor is made of.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.check.grading.compare import close, other_kind, same
from labkit.check.grading.exercise import Case, Exercise, Outcome, Problem, at_its_size, where
from labkit.check.grading.words import Found, Mistake, named
from labkit.check.grading.wrong_tensor import contents, name_mistake
from labkit.collectives.ring import split_chunks

Ranks = tuple[Outcome, ...]


def value_problems(exercise: Exercise, cases: list[Case], outcomes: list[Ranks]) -> list[Problem]:
    """Return the first problem with the values, over the cases in order: a list of at most one."""
    for case, ranks in zip(cases, outcomes):
        found = _told(exercise, case, [outcome.value for outcome in ranks])
        if not found and exercise.judge is None:
            found = _first_wrong(exercise, case, ranks) or _same_bits(exercise, case, ranks)
        if found:
            return [at_its_size(found, case, exercise)]
    return []


def _told(exercise: Exercise, case: Case, values: list[Any]) -> Problem | None:
    """What a rank has noticed itself, or what the exercise's judge has found."""
    place = where(case, exercise)
    noticed = [rank for rank, value in enumerate(values) if isinstance(value, Mistake)]
    if noticed:
        place += f", rank {noticed[0]}" if case.world_size > 1 else ""
        found = values[noticed[0]]
    else:
        found = exercise.judge and exercise.judge(case, values)
    told = Mistake("told.place", place=place, what=found)
    return Problem("value", "wrong", told) if found else None


def _first_wrong(exercise: Exercise, case: Case, ranks: Ranks) -> Problem | None:
    expected = [exercise.expected(rank, case) for rank in range(case.world_size)]
    right = [_graded_same(exercise, o.value, due) for o, due in zip(ranks, expected)]
    if all(right):
        return None
    rank = right.index(False)
    wrong = Mistake("value.wrong", place=where(case, exercise), rank=rank, part="")
    if kind := other_kind(ranks[rank].value, expected[rank]):
        wrong.why = kind
        return Problem("shape", "wrong", wrong)
    wrong.why = _whole_mistake(exercise, case, ranks, expected[rank], rank)
    if not wrong.why:
        wrong.details["part"], wrong.why = _part_mistake(
            exercise, case, rank, ranks[rank].value, expected[rank]
        )
    if sum(right) == 1 and expected[right.index(True)] is not None:
        wrong.also.append(Mistake("value.one_right", rank=right.index(True)))
    if exercise.sizes and case.size != exercise.sizes[0]:
        wrong.also.append(_odd_size(exercise, case))
    return Problem("value", "wrong", wrong)


def _graded_same(exercise: Exercise, value: Any, expected: Any) -> bool:
    anything = exercise.written is not None and expected is None
    return anything or same(value, expected)


def _whole_mistake(
    exercise: Exercise, case: Case, ranks: Ranks, expected: Any, rank: int
) -> Found:
    """A mistake that explains the whole value: the exercise's own, or a result in new tensors."""
    for these in (range(case.world_size), [rank]):
        for key, wrong in exercise.mistakes.items():
            if all(same(ranks[r].value, wrong(r, case)) for r in these):
                return named(key)
    meant = ranks[rank].stand_in
    if meant is None or not _graded_same(exercise, meant, expected):
        return None
    return Mistake("value.new_chunks" if isinstance(meant, list) else "value.new_tensor")


def _part_mistake(
    exercise: Exercise, case: Case, rank: int, value: Any, expected: Any
) -> tuple[str, Mistake]:
    """Where the first wrong part is, in words, and what it looks like."""
    parts = _parts(exercise, case, value, expected)
    wrong = next(part for part in parts if part.due is not None and not part.right)
    place = f", in {wrong.name} {wrong.index}" if wrong.name else ""
    if isinstance(wrong.due, Tensor):
        return place, _look(exercise, case, rank, wrong, parts)
    value, due = f"{wrong.value!r:.60}", f"{wrong.due!r:.60}"
    return place, Mistake("value.differs", value=value, due=due)


class _Part(NamedTuple):
    """What is compared separately: an entry of a list, a chunk, or the whole value (no name)."""

    name: str
    index: int
    value: Any
    due: Any

    @property
    def right(self) -> bool:
        return same(self.value, self.due)


def _parts(exercise: Exercise, case: Case, value: Any, expected: Any) -> list[_Part]:
    if isinstance(expected, (list, tuple)):
        name = "chunk" if exercise.chunked else "entry"
    elif exercise.chunked:
        name, value = "chunk", split_chunks(value, case.world_size)
        expected = split_chunks(expected, case.world_size)
    else:
        name, value, expected = "", [value], [expected]
    return [_Part(name, i, v, e) for i, (v, e) in enumerate(zip(value, expected))]


def _look(exercise: Exercise, case: Case, rank: int, wrong: _Part, parts: list[_Part]) -> Mistake:
    """The mistake that a wrong tensor looks like."""
    value, due = wrong.value, wrong.due
    if kind := other_kind(value, due):
        return kind
    if not torch.isfinite(value).all():
        return Mistake("value.not_finite")
    if not value.any():
        return Mistake("value.zeros")
    for other in parts:
        if other.due is not None and same(value, other.due):
            id = "value.rotated" if exercise.chunked else "value.elsewhere"
            shift = (other.index - wrong.index) % case.world_size
            return Mistake(id, name=other.name, index=other.index, shift=shift)
    basis, chunk = _basis(exercise, case), wrong.index if exercise.chunked else 0
    found, wanted = contents(value, basis, chunk), contents(due, basis, chunk)
    if found is None or wanted is None:
        return _numbers_differ(value.flatten(), due.flatten())
    complete = _complete_elsewhere(basis, case, parts)
    if complete is not None:
        shift = (complete - chunk) % case.world_size
        return Mistake("chunk.other_complete", other=complete, chunk=chunk, shift=shift)
    return name_mistake(found, wanted, (rank, chunk), case.world_size)


def _complete_elsewhere(basis: dict, case: Case, parts: list[_Part]) -> int | None:
    """A chunk that holds the sum over all ranks, among those that may hold anything."""
    for part in parts:
        everyone = {(rank, part.index): 1 for rank in range(case.world_size)}
        if part.due is None and contents(part.value, basis, part.index) == everyone:
            return part.index
    return None


def _basis(exercise: Exercise, case: Case) -> dict[tuple[int, int], Tensor]:
    """Everything that a wrong value can be made of: each rank's input, chunk by chunk."""
    basis = {}
    for rank in range(case.world_size):
        args = exercise.inputs(rank, case)
        own = next((arg for arg in args if isinstance(arg, (Tensor, list))), [])
        if isinstance(own, Tensor):
            own = split_chunks(own, case.world_size) if exercise.chunked else [own]
        for index, piece in enumerate(own):
            if isinstance(piece, Tensor):
                basis[rank, index] = piece
    return basis


def _odd_size(exercise: Exercise, case: Case) -> Mistake:
    what = "one" if case.size == 1 else "other"
    if exercise.chunked and case.size < case.world_size:
        what = "below_ranks"
    elif exercise.chunked and case.size % case.world_size:
        what = "indivisible"
    sizes = {"size": exercise.sizes[0], "odd": case.size, "ranks": case.world_size}
    return Mistake(f"value.size_{what}", **sizes)


def _numbers_differ(value: Tensor, due: Tensor) -> Mistake:
    first = int((~close(value, due)).nonzero()[0])
    start = f"from index {first} on it has" if first else "it begins with"
    numbers = {"value": _numbers(value[first:]), "due": _numbers(due[first:])}
    return Mistake("value.numbers", start=start, **numbers)


def _numbers(tensor: Tensor) -> str:
    first = ", ".join(f"{x:.4g}" for x in tensor[:3].tolist())
    return f"[{first}{', ...' if tensor.numel() > 3 else ''}]"


def _same_bits(exercise: Exercise, case: Case, ranks: Ranks) -> Problem | None:
    for rank, outcome in enumerate(ranks if exercise.same_bits else ()):
        if not torch.equal(outcome.value, ranks[0].value):
            told = Mistake("value.last_bits", place=where(case, exercise), rank=rank)
            return Problem("same bits", "no", told)
    return None
