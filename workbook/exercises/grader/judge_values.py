"""Judge the values: name the first wrong rank and part, and what is wrong with it.

``workbook.exercises.grader.wrong_tensor`` works out what a wrong tensor is made of.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.collectives.ring import split_chunks
from labkit.units import format_count
from workbook.exercises.grader.compare import close, fit, other_kind, plain, same
from workbook.exercises.grader.exercise import Case, Exercise, Outcome, Problem, at_its_size, where
from workbook.exercises.grader.words import Found, Mistake, named
from workbook.exercises.grader.wrong_tensor import contents, name_mistake

Ranks = tuple[Outcome, ...]
Tried = dict[Case, Ranks]


def value_problems(exercise: Exercise, cases: list[Case], outcomes: list[Ranks]) -> list[Problem]:
    """Return the first problem with the values, over the cases in order: a list of at most one."""
    tried = dict(zip(cases, outcomes))
    for case, ranks in tried.items():
        found = _told(exercise, case, [outcome.value for outcome in ranks])
        if not found and exercise.judge is None:
            found = _first_wrong(exercise, tried, case) or _same_bits(exercise, case, ranks)
        if found:
            return [at_its_size(_if_called_again(found, exercise, case), case, exercise)]
    return []


def _if_called_again(found: Problem, exercise: Exercise, case: Case) -> Problem:
    """Say so if only the second call went wrong: the first of each kind was judged before it."""
    if case.call and found.mistake:
        found.mistake.also.append(Mistake("value.second_call"))
    return found


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


def _first_wrong(exercise: Exercise, tried: Tried, case: Case) -> Problem | None:
    ranks = tried[case]
    right = [_is_right(exercise, case, rank, one.value) for rank, one in enumerate(ranks)]
    if all(right):
        return None
    rank = right.index(False)
    wrong = Mistake("value.wrong", place=where(case, exercise), rank=rank, part="")
    if kind := other_kind(ranks[rank].value, exercise.expected(rank, case)):
        wrong.why = kind
        return Problem("shape", "wrong", wrong)
    wrong.why = _whole_mistake(exercise, tried, case, rank)
    if not wrong.why:
        wrong.details["part"], wrong.why = _part_mistake(exercise, tried, case, rank)
    if sum(right) == 1 and exercise.expected(right.index(True), case) is not None:
        wrong.also.append(Mistake("value.one_right", rank=right.index(True)))
    wrong.also += _odd_size(exercise, case)
    return Problem("value", "wrong", wrong)


def _is_right(exercise: Exercise, case: Case, rank: int, value: Any) -> bool:
    expected = exercise.expected(rank, case)
    if exercise.written is not None and expected is None:
        return True
    if expected is None or other_kind(value, expected):
        return same(value, expected)
    return all(part.right for part in _parts(exercise, case, value, expected))


def _whole_mistake(exercise: Exercise, tried: Tried, case: Case, rank: int) -> Found:
    """A mistake that explains the whole value in all cases, or a result in new tensors."""
    every = range(case.world_size)
    for ranks, rights_too in ((every, True), (every, False), ([rank], False)):
        for key, wrong in exercise.mistakes.items():
            if _explains(wrong, exercise, tried, ranks, rights_too):
                return named(key)
    if case.call and same(tried[case][rank].value, exercise.expected(rank, replace(case, call=0))):
        return Mistake("value.of_first_call")
    meant = tried[case][rank].stand_in
    if meant is None or not _is_right(exercise, case, rank, meant):
        return None
    return Mistake("value.new_chunks" if isinstance(meant, list) else "value.new_tensor")


def _explains(
    mistake: Callable, exercise: Exercise, tried: Tried, ranks: Iterable[int], rights_too: bool
) -> bool:
    """Whether a mistake leads to all values of these ranks, or to all that are wrong."""
    return all(
        same(outcomes[rank].value, mistake(rank, case))
        or not (rights_too or not _is_right(exercise, case, rank, outcomes[rank].value))
        for case, outcomes in tried.items()
        for rank in ranks
    )


def _part_mistake(exercise: Exercise, tried: Tried, case: Case, rank: int) -> tuple[str, Mistake]:
    """Where the first wrong part is, in words, and what it looks like."""
    wrong, looks = _first_part(exercise, tried, case, rank)
    place = f", in {wrong.name} {wrong.index}" if wrong.name else ""
    if not isinstance(wrong.due, Tensor):
        value, due = f"{wrong.value!r:.60}", f"{wrong.due!r:.60}"
        return place, Mistake("value.differs", value=value, due=due)
    if looks and looks.id != "value.kind" and not _looks_alike_again(exercise, tried, case, rank):
        looks = None
    return place, looks or _numbers_differ(wrong)


def _looks_alike_again(exercise: Exercise, tried: Tried, case: Case, rank: int) -> bool:
    """Whether the value of the other call, with other data, has the same name."""
    twin = replace(case, call=1 - case.call)
    if twin not in tried:
        return True
    if other_kind(tried[twin][rank].value, exercise.expected(rank, twin)):
        return False
    both = [_first_part(exercise, tried, one, rank)[1] for one in (case, twin)]
    return len({looks.id if looks else None for looks in both}) == 1


def _first_part(
    exercise: Exercise, tried: Tried, case: Case, rank: int
) -> tuple["_Part", Mistake | None]:
    """The first part of a value that is wrong, and the mistake that it looks like."""
    value, expected = tried[case][rank].value, exercise.expected(rank, case)
    parts = _parts(exercise, case, value, expected)
    wrong = next((part for part in parts if not part.right), parts[0])
    is_tensor = isinstance(wrong.due, Tensor)
    return wrong, _look(exercise, case, rank, wrong, parts) if is_tensor else None


class _Part(NamedTuple):
    """What is compared separately: an entry of a list, a chunk, or the whole value (no name).

    ``summands`` are the inputs of the ranks that may have been added up in it.
    """

    name: str
    index: int
    value: Any
    due: Any
    summands: list[Tensor]

    @property
    def right(self) -> bool:
        return self.due is None or same(self.value, self.due, self.summands)


def _parts(exercise: Exercise, case: Case, value: Any, expected: Any) -> list[_Part]:
    expected = plain(expected)
    value = fit(value, expected)
    if isinstance(expected, list):
        name = "chunk" if exercise.chunked else "entry"
    elif exercise.chunked:
        name, value, expected = "chunk", _chunks(value, case), _chunks(expected, case)
    else:
        name, value, expected = "", [value], [expected]
    given = _given(exercise, case)
    return [
        _Part(name, i, v, e, given[i] if exercise.chunked else list(chain(*given.values())))
        for i, (v, e) in enumerate(zip(value, expected))
    ]


def _chunks(tensor: Tensor, case: Case) -> list[Tensor]:
    return split_chunks(tensor.flatten(), case.world_size)


def _given(exercise: Exercise, case: Case) -> dict[int, list[Tensor]]:
    """The tensors that all ranks get, by chunk, or by entry of a list."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for rank in range(case.world_size):
        for arg in exercise.inputs(rank, case):
            if isinstance(arg, Tensor):
                arg = _chunks(arg, case) if exercise.chunked else [arg]
            for index, entry in enumerate(arg if isinstance(arg, list) else []):
                found[index] += [entry] if isinstance(entry, Tensor) else []
    return found


def _look(
    exercise: Exercise, case: Case, rank: int, wrong: _Part, parts: list[_Part]
) -> Mistake | None:
    """The mistake that a wrong tensor looks like; None if it looks like none."""
    value, due = wrong.value, wrong.due
    if wrong.right:
        return None
    if kind := other_kind(value, due):
        return kind
    if not torch.isfinite(value).all():
        return Mistake("value.not_finite")
    if not value.any():
        return Mistake("value.zeros")
    for other in parts:
        if other is not wrong and other.due is not None and same(value, other.due):
            id = "value.rotated" if exercise.chunked else "value.elsewhere"
            shift = (other.index - wrong.index) % case.world_size
            return Mistake(id, name=other.name, index=other.index, shift=shift)
    basis, chunk = _basis(exercise, case), wrong.index if exercise.chunked else 0
    found, wanted = contents(value, basis, chunk), contents(due, basis, chunk)
    if found is None or wanted is None:
        return None
    complete = _complete_elsewhere(basis, case, parts)
    if complete is not None:
        shift = (complete - chunk) % case.world_size
        return Mistake("chunk.other_complete", other=complete, chunk=chunk, shift=shift)
    if found == wanted:
        return _inexact(wrong)
    return name_mistake(found, wanted, (rank, chunk), case.world_size)


def _inexact(wrong: _Part) -> Mistake:
    """Almost right: were the values stored in 16 bits, or is the error of another kind?"""
    value = wrong.value.float()
    if any(torch.equal(value, value.to(kind).float()) for kind in (torch.half, torch.bfloat16)):
        return Mistake("sum.rounded")
    place = _first_difference(wrong)
    numbers = (f"{float(tensor.flatten()[place]):.8g}" for tensor in (value, wrong.due))
    return Mistake("sum.inexact", place=place, **dict(zip(("value", "due"), numbers)))


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
            own = _chunks(own, case) if exercise.chunked else [own]
        for index, piece in enumerate(own):
            if isinstance(piece, Tensor):
                basis[rank, index] = piece
    return basis


def _odd_size(exercise: Exercise, case: Case) -> list[Mistake]:
    """That it is right at the first size, where this size is but another size."""
    if not exercise.sizes or case.size == exercise.sizes[0] or case.size in exercise.case_words:
        return []
    what = "one" if case.size == 1 else "other"
    if exercise.chunked and case.size < case.world_size:
        what = "below_ranks"
    elif exercise.chunked and case.size % case.world_size:
        what = "indivisible"
    sizes = [format_count(size, exercise.nouns[1]) for size in (exercise.sizes[0], case.size)]
    named = {"size": sizes[0], "odd": sizes[1], "ranks": case.world_size}
    return [Mistake(f"value.size_{what}", **named)]


def _numbers_differ(wrong: _Part) -> Mistake:
    first = _first_difference(wrong)
    start = f"from index {first} on it has" if first else "it begins with"
    value, due = (_numbers(tensor.flatten()[first:]) for tensor in (wrong.value, wrong.due))
    return Mistake("value.numbers", start=start, value=value, due=due)


def _first_difference(wrong: _Part) -> int:
    return int((~close(wrong.value, wrong.due, wrong.summands)).flatten().nonzero()[0])


def _numbers(tensor: Tensor) -> str:
    first = ", ".join(f"{x:.4g}" for x in tensor[:3].tolist())
    return f"[{first}{', ...' if tensor.numel() > 3 else ''}]"


def _same_bits(exercise: Exercise, case: Case, ranks: Ranks) -> Problem | None:
    for rank, outcome in enumerate(ranks if exercise.same_bits else ()):
        if not torch.equal(outcome.value, ranks[0].value):
            told = Mistake("value.last_bits", place=where(case, exercise), rank=rank)
            return Problem("same bits", "no", told)
    return None
