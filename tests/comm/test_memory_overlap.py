"""Whether tensors share memory, compared with a check of every byte."""

import itertools
import random

import pytest
import torch

from labkit.comm.memory_overlap import check_apart, overlap


def some_view(base, draw):
    """A view of 1 to 3 dimensions with any strides, now and then empty or of another dtype."""
    sizes = [draw.randint(0 if draw.random() < 0.1 else 1, 4) for _ in range(draw.randint(1, 3))]
    steps = [draw.randint(0, 9) for _ in sizes]
    dtype = draw.choice([torch.uint8, torch.int16, torch.int32])
    flat = base.view(dtype)
    room = len(flat) - 1 - sum(max(0, n - 1) * step for n, step in zip(sizes, steps))
    return flat.as_strided(sizes, steps, draw.randint(0, max(0, min(room, 12))))


def touches(base, view):
    """The bytes of ``base`` that a view writes to."""
    base.zero_()
    view.fill_(-1 if view.dtype.is_signed else 255)
    return set(base.nonzero().flatten().tolist())


def test_any_two_views_share_memory_exactly_if_they_share_a_byte():
    draw, base = random.Random(0), torch.zeros(512, dtype=torch.uint8)
    found = []
    for _ in range(3000):
        one, other = some_view(base, draw), some_view(base, draw)
        shared = bool(touches(base, one) & touches(base, other))
        assert overlap(one, other) == overlap(other, one) == shared, (one.stride(), other.stride())
        found.append(shared)
    assert 0.2 < sum(found) / len(found) < 0.9


MATRIX = torch.zeros(6, 8)
APART = {
    "halves": (MATRIX[:3], MATRIX[3:]),
    "columns": (MATRIX[:, 0], MATRIX[:, 1]),
    "every second": (MATRIX.view(-1)[::2], MATRIX.view(-1)[1::2]),
    "blocks of columns": (MATRIX[:, :4], MATRIX[:, 4:]),
    "real and imaginary": torch.view_as_real(torch.zeros(5, dtype=torch.complex64)).unbind(-1),
    "nothing, in the middle of the other": (MATRIX, MATRIX[2, :0]),
    "two tensors": (torch.zeros(3), torch.zeros(3)),
}


@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_parts_of_one_tensor_lie_apart(pair):
    assert not overlap(*pair)
    check_apart(dict(zip("ab", pair)))


def test_what_is_written_lies_apart_from_everything_and_what_is_only_read_need_not():
    rows = MATRIX.unbind(0)
    check_apart({"a": rows[0]}, {"b": rows[1], "c": rows[1], "d": MATRIX[1:]})
    for written, read in (({"a": rows[2]}, {"b": rows[2]}), ({"a": MATRIX, "b": rows[5]}, {})):
        with pytest.raises(ValueError, match=r"^a and b share memory.*\.clone\(\)$"):
            check_apart(written, read)


def test_tall_columns_are_told_apart_without_looking_at_each_element():
    tall = torch.empty(10_000_000, 3, dtype=torch.uint8)
    for one, other in itertools.permutations(tall.unbind(1), 2):
        assert not overlap(one, other)
    assert overlap(tall[:, 0], tall.view(-1)[::2])
