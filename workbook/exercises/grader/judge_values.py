"""Judge the values: name the first wrong rank and part, and say of what the value is made.

The inputs are random, so a linear fit tells how a value was put together: "0.5 x rank 0 + rank 2".
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.collectives.ring import split_chunks
from workbook.exercises.grader.compare import agree, beside, close, fit, other_kind, plain
from workbook.exercises.grader.exercise import Case, Exercise, Found, Outcome, Ranks, Wrong

# Values that were rounded to bfloat16 after every addition are still recognised.
_ROUNDED = 1e-2
# More parts, or larger factors, explain nothing.
_MOST_PARTS, _LARGEST = 8, 100
Tried = Mapping[Case, Ranks]


def value_problem(exercise: Exercise, tried: Tried) -> Found:
    """Return the first problem with the values, over the cases in order."""
    for case, ranks in tried.items():
        values, place, found = [outcome.value for outcome in ranks], exercise.where(case), None
        if noticed := [rank for rank, value in enumerate(values) if isinstance(value, Wrong)]:
            rank = f", rank {noticed[0]}" if len(ranks) > 1 else ""
            found = f"{place}{rank}: {values[noticed[0]]}"
        elif exercise.judge is None:
            found = _first_wrong(exercise, tried, case)
        elif found := exercise.judge(case, values):
            found = f"{place}: {found}"
        if not found and (changed := max(outcome.changed for outcome in ranks)):
            found = f"{place}: {changed}"
        if found:
            # A judge may find in the data of one call what those of the other do not show.
            unjudged = exercise.judge is None and not noticed
            again = unjudged and case.call and place == exercise.where(replace(case, call=0))
            given = "other data" if exercise.nouns[0] else "the same arguments"
            return found + (f". The first call, with {given}, went right" if again else "")
    return None


def _first_wrong(exercise: Exercise, tried: Tried, case: Case) -> Found:
    for rank, outcome in enumerate(tried[case]):
        wrong = _wrong_part(exercise, case, rank, outcome.value)
        if wrong is None:
            continue
        text = exercise.where(case)
        text += f", rank {rank} is the first with a wrong result" if case.world_size > 1 else ""
        if kind := other_kind(outcome.value, exercise.expected(rank, case)):
            return f"{text}: {kind}"
        if meant := _meant(exercise, case, rank, outcome):
            return f"{text}: {meant}"
        text += f", in {wrong.name} {wrong.index}" if wrong.name else ""
        why = _named(exercise, tried, rank)
        return f"{text}: {_look(exercise, case, wrong)}" + (f": {why}" if why else "")
    return None


def _named(exercise: Exercise, tried: Tried, rank: int) -> str:
    """A mistake that explains all values of this rank."""
    for sentence, wrong in exercise.mistakes.items():
        if all(agree(ranks[rank].value, wrong(rank, case)) for case, ranks in tried.items()):
            return sentence
    return ""


def _meant(exercise: Exercise, case: Case, rank: int, outcome: Outcome) -> str:
    """What to say of a value that is right in another place, or was right in the first call."""
    if case.call and not _wrong_part(exercise, replace(case, call=0), rank, outcome.value):
        return "it is the result of the first call, although the values are others now"
    if outcome.stand_in is None or _wrong_part(exercise, case, rank, outcome.stand_in):
        return ""
    text = "the right values are in a new tensor, and the given one has not changed: write into "
    return text + "it (+=, copy_, recv), because a = a + b makes a new tensor"


class _Part(NamedTuple):
    """What is compared separately: an entry of a list, a chunk, or the whole value (no name)."""

    name: str
    index: int
    value: Any
    expected: Any
    given: list[Tensor]  # what may have been added up in it: inputs of the ranks


def _wrong_part(exercise: Exercise, case: Case, rank: int, value: Any) -> _Part | None:
    """The first part of a rank's value that is not as expected."""
    expected = plain(exercise.expected(rank, case))
    if expected is None:
        right = exercise.written is not None or value is None
        return None if right else _Part("", 0, value, None, [])
    if other_kind(value, expected):
        return None if agree(value, expected) else _Part("", 0, value, expected, [])
    value, name = fit(value, expected), "chunk" if exercise.chunked else "entry"
    if not isinstance(expected, list):
        value, expected = _pieces(exercise, case, value), _pieces(exercise, case, expected)
        name = name if exercise.chunked else ""
    rows = [_given(exercise, case, rank) for rank in range(case.world_size)]
    for i, (v, e) in enumerate(zip(value, expected)):
        given = [row[i] for row in rows if i < len(row)] if exercise.chunked else chain(*rows)
        summands = [one for one in given if isinstance(one, Tensor)]
        if e is None or agree(v, e, summands):
            continue
        # Inputs of the same shape are not always summands: products of them may be.
        if exercise.parts and agree(v, e):
            continue
        return _Part(name, i, v, e, [] if exercise.parts else summands)
    return None


def _pieces(exercise: Exercise, case: Case, value: Any) -> list:
    """The chunks of a tensor, if it is judged by chunks; a list as it is."""
    if isinstance(value, list):
        return value
    return split_chunks(value.flatten(), case.world_size) if exercise.chunked else [value]


def _given(exercise: Exercise, case: Case, rank: int) -> list:
    """What a rank gets, by chunk or entry."""
    given = [one for one in exercise.inputs(rank, case) if isinstance(one, (Tensor, list))]
    return [piece for one in given for piece in _pieces(exercise, case, one)]


def _look(exercise: Exercise, case: Case, wrong: _Part) -> str:
    """What a wrong part looks like."""
    value, expected = wrong.value, wrong.expected
    if kind := other_kind(value, expected):
        return kind
    flat, wanted = _flat(value), _flat(expected)
    if flat is None or wanted is None or flat.shape != wanted.shape:
        return f"it is {beside(value, expected)}"
    if not torch.isfinite(flat).all():
        return "it holds NaN or infinity (is a tensor from torch.empty read before it is filled?)"
    basis = dict(exercise.parts(case)) if exercise.parts else {}
    for r in range(case.world_size if not exercise.parts else 0):
        for i, piece in enumerate(_given(exercise, case, r)):
            here = i == wrong.index or not exercise.chunked
            basis.setdefault(f"rank {r}" if here else f"chunk {i} of rank {r}", piece)
    basis = {name: _flat(one) for name, one in basis.items()}
    made, should = made_of(flat, basis), made_of(wanted, basis)
    if not should and (times := made_of(flat, {"the expected values": wanted})):
        return f"it is {in_words(times)}"
    if made and should and made != should:
        return f"it is {in_words(made)}, expected {in_words(should)}"
    first = 0
    if isinstance(expected, Tensor):
        first = int((~close(value, expected, wrong.given)).flatten().nonzero()[0])
    almost = "almost right: " if made and made == should else ""
    pair = beside(float(flat[first]), float(wanted[first]))
    return f"it is {almost}{pair} at place {first}"


def _flat(value: Any) -> Tensor | None:
    """A tensor, or a list of tensors, in one row; None for anything else."""
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, list) and value and all(isinstance(one, Tensor) for one in value):
        value = torch.cat([one.flatten() for one in value])
    return value.flatten() if isinstance(value, Tensor) and value.dtype != torch.bool else None


def made_of(value: Tensor, basis: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By which factors the named parts, [n], add up to a value, [n]; {} if it cannot be told."""
    parts = {k: t for k, t in basis.items() if t is not None and t.shape == value.shape}
    # A fit over as many parts as there are numbers would explain anything.
    if 2 * len(parts) > value.numel():
        parts = {name: one for name, one in parts.items() if not name.startswith("chunk")}
    if not parts or len(parts) >= value.numel():
        return {}
    matrix = torch.stack([one.double() for one in parts.values()], dim=1)
    target = value.detach().double().reshape(-1, 1)
    found = torch.linalg.lstsq(matrix, target).solution
    # Multiples of 1 / 12 where they fit: whole numbers, also divided by 2, 3 or 4 ranks.
    for rounded in ((found * 12).round() / 12, (found * 1000).round() / 1000):
        near = bool((matrix @ rounded - target).abs().max() <= _ROUNDED * target.abs().max())
        factors = {name: x for name, x in zip(parts, rounded.flatten().tolist()) if x}
        if near and 0 < len(factors) <= _MOST_PARTS:
            return factors if max(map(abs, factors.values())) < _LARGEST else {}
    return {}


def in_words(made: Mapping[str, float]) -> str:
    """``0.5 x rank 0 + rank 2``."""
    return " + ".join(name if x == 1 else f"{x:.3g} x {name}" for name, x in made.items())
