"""Are the values right, and if not: which rank and which part is the first that is wrong, and why.

What is in a wrong tensor is worked out in ``labkit.check.grading.contents``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from labkit.check.grading.compare import close, misshapen, same
from labkit.check.grading.contents import contents, name_mistake
from labkit.check.grading.exercise import Case, Exercise, Outcome, Problem, at_its_size, where
from labkit.collectives.ring import split_chunks


def value_problems(
    exercise: Exercise, cases: list[Case], outcomes: list[tuple[Outcome, ...]]
) -> list[Problem]:
    """The first problem with the values, over the cases in their order; none, or one."""
    for case, ranks in zip(cases, outcomes):
        if exercise.judge is not None:
            sentence = exercise.judge(case, [outcome.value for outcome in ranks])
            found = sentence and Problem("value", "wrong", f"{where(case, exercise)}: {sentence}")
        else:
            found = _first_wrong(exercise, case, ranks) or _same_bits(exercise, case, ranks)
        if found:
            return [at_its_size(found, case, exercise)]
    return []


def _first_wrong(exercise: Exercise, case: Case, ranks: tuple[Outcome, ...]) -> Problem | None:
    expected = [exercise.expected(rank, case) for rank in range(case.world_size)]
    bad = [
        r
        for r, outcome in enumerate(ranks)
        if not _graded_same(exercise, outcome.value, expected[r])
    ]
    if not bad:
        return None
    rank = bad[0]
    start = f"{where(case, exercise)}, rank {rank} is the first that is wrong"
    if other_shape := misshapen(ranks[rank].value, expected[rank]):
        return Problem("shape", "wrong", f"{start}: {other_shape}")
    story = _story(exercise, case, ranks, expected[rank], rank)
    others = [r for r in range(case.world_size) if r not in bad]
    if len(others) == 1 and case.world_size > 1 and expected[others[0]] is not None:
        story += f". Rank {others[0]} alone has the right result"
    if exercise.sizes and case.size != exercise.sizes[0]:
        story += f". {exercise.sizes[0]} elements came out right; {_odd_size(exercise, case)}"
    return Problem("value", "wrong", f"{start}{story}")


def _graded_same(exercise: Exercise, value: Any, expected: Any) -> bool:
    anything = exercise.written is not None and expected is None
    return anything or same(value, expected)


def _story(
    exercise: Exercise, case: Case, ranks: tuple[Outcome, ...], expected: Any, rank: int
) -> str:
    """The words after "rank 0 is the first that is wrong"."""
    outcome = ranks[rank]
    for these in (range(case.world_size), [rank]):
        for sentence, wrong in exercise.mistakes.items():
            if all(same(ranks[r].value, wrong(r, case)) for r in these):
                return f": {sentence}"
    if _graded_same(exercise, outcome.stand_in, expected) and outcome.stand_in is not None:
        return ": " + _not_in_place(outcome.stand_in)
    parts = list(_parts(exercise, case, outcome.value, expected))
    wrong = next(part for part in parts if part.due is not None and not part.right)
    place = f", in {wrong.name} {wrong.index}" if wrong.name else ""
    if not isinstance(wrong.due, torch.Tensor):
        return f"{place}: it has {wrong.value!r:.60}, where {wrong.due!r:.60} is due"
    return f"{place}: {_look(exercise, case, rank, wrong, parts)}"


def _not_in_place(stand_in: Any) -> str:
    if isinstance(stand_in, list):
        return (
            "the list holds the right chunks, but they are new tensors, and the tensor that the "
            "chunks were cut from is not changed: write into them (+=, .copy_, recv)"
        )
    return (
        "what it returned is right, but the tensor it was given is not changed: work in place "
        "(tensor += ..., tensor.copy_(...)), since tensor = tensor + ... makes a new one"
    )


class _Part(NamedTuple):
    """What is compared on its own: an entry of a list, a chunk, or the whole value (no name)."""

    name: str
    index: int
    value: Any
    due: Any

    @property
    def right(self) -> bool:
        return same(self.value, self.due)


def _parts(exercise: Exercise, case: Case, value: Any, expected: Any) -> Iterator[_Part]:
    if isinstance(expected, (list, tuple)):
        name = "chunk" if exercise.chunked else "entry"
        yield from (_Part(name, i, v, e) for i, (v, e) in enumerate(zip(value, expected)))
    elif exercise.chunked:
        pairs = zip(split_chunks(value, case.world_size), split_chunks(expected, case.world_size))
        yield from (_Part("chunk", i, v, e) for i, (v, e) in enumerate(pairs))
    else:
        yield _Part("", 0, value, expected)


def _look(exercise: Exercise, case: Case, rank: int, wrong: _Part, parts: list[_Part]) -> str:
    """What a wrong tensor looks like."""
    value, due = wrong.value, wrong.due
    if other_shape := misshapen(value, due):
        return other_shape
    if not torch.isfinite(value).all():
        return "it holds NaN or infinity: was memory of torch.empty used before it was filled?"
    if not value.any():
        return "it is all zeros"
    for other in parts:
        if other.due is not None and same(value, other.due):
            shift = (other.index - wrong.index) % case.world_size
            rotated = f": the numbers are rotated by {shift}" if exercise.chunked else ""
            return f"it holds what belongs in {other.name} {other.index}{rotated}"
    basis, chunk = _basis(exercise, case), wrong.index if exercise.chunked else 0
    found, wanted = contents(value, basis, chunk), contents(due, basis, chunk)
    if found is None or wanted is None:
        return _numbers_differ(value.flatten(), due.flatten())
    complete = _complete_elsewhere(basis, case, parts)
    if complete is not None:
        shift = (complete - chunk) % case.world_size
        return (
            f"chunk {complete} is complete there, where chunk {chunk} should be: the "
            f"numbers are rotated by {shift}"
        )
    return name_mistake(found, wanted, (rank, chunk), case.world_size)


def _complete_elsewhere(basis: dict, case: Case, parts: list[_Part]) -> int | None:
    """A chunk that holds the sum over all ranks, among those that may hold anything."""
    for part in parts:
        everyone = {(rank, part.index): 1 for rank in range(case.world_size)}
        if part.due is None and contents(part.value, basis, part.index) == everyone:
            return part.index
    return None


def _basis(exercise: Exercise, case: Case) -> dict[tuple[int, int], torch.Tensor]:
    """Everything that a wrong value can be made of: each rank's input, chunk by chunk."""
    basis = {}
    for rank in range(case.world_size):
        args = exercise.inputs(rank, case)
        own = next((arg for arg in args if isinstance(arg, (torch.Tensor, list))), [])
        if isinstance(own, torch.Tensor):
            own = split_chunks(own, case.world_size) if exercise.chunked else [own]
        for index, piece in enumerate(own):
            if isinstance(piece, torch.Tensor):
                basis[rank, index] = piece
    return basis


def _odd_size(exercise: Exercise, case: Case) -> str:
    if case.size == 0:
        return "here the tensor is empty"
    if exercise.chunked and case.size < case.world_size:
        return "here there are fewer elements than ranks, so chunks may be empty"
    if exercise.chunked and case.size % case.world_size:
        return f"{case.size} does not divide by {case.world_size}, so chunks differ in length"
    return "here there is one" if case.size == 1 else f"here there are {case.size}"


def _numbers_differ(value: torch.Tensor, due: torch.Tensor) -> str:
    first = int((~close(value, due)).nonzero()[0])
    start = f"from index {first} on it has" if first else "it begins with"
    return f"{start} {_numbers(value[first:])}, where {_numbers(due[first:])} is due"


def _numbers(tensor: torch.Tensor) -> str:
    first = ", ".join(f"{x:.4g}" for x in tensor[:3].tolist())
    return f"[{first}{', ...' if tensor.numel() > 3 else ''}]"


def _same_bits(exercise: Exercise, case: Case, ranks: tuple[Outcome, ...]) -> Problem | None:
    if not exercise.same_bits:
        return None
    for rank, outcome in enumerate(ranks):
        if not torch.equal(outcome.value, ranks[0].value):
            sentence = (
                f"{where(case, exercise)}, ranks 0 and {rank} have the same sum but for the last "
                "bits: they add in different orders, so replicas drift apart"
            )
            return Problem("same bits", "no", sentence)
    return None
