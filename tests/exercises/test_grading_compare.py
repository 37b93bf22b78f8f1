"""Right values in other clothes are equal; almost right ones are not."""

from collections import defaultdict, deque
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from workbook.exercises.grader.compare import agree, close, other_kind

ROW = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ROW.numpy(), ROW),
        (ROW.double().requires_grad_(), ROW),
        (list(ROW), ROW),
        (iter([1, 2, 3]), ROW),
        (ROW, [1.0, 2.0, 3.0]),
        (torch.stack([ROW, ROW]), [ROW, ROW]),
        (range(3), [0, 1, 2]),
        (deque([0, 1]), (0, 1)),
        ({0: "a", 1: "b"}.keys(), [0, 1]),
        (defaultdict(list, {"dp": [(0, 1), torch.tensor([2, 3])]}), {"dp": [[0, 1], [2, 3]]}),
        (np.int64(3), 3),
        (torch.tensor([3.0]), 3),
        (Fraction(1, 2), 0.5),
        (Decimal(3), 3),
        (torch.tensor(False), False),
        (3, torch.tensor(3.0)),
    ],
)
def test_clothes_do_not_count(value, expected):
    assert agree(value, expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ROW[None], ROW),
        (ROW[:2], ROW),
        (ROW * (1 + 5e-5), ROW),
        ((ROW / 3).half(), ROW / 3),
        ("3", 3),
        (None, 0),
        ([1, 2], [2, 1]),
        ([1, 2], [1, None]),
        ({"dp": [0]}, {"dp": [0], "tp": [0]}),
        ({"dp": [0]}, {"dp": [1]}),
        (0.1 + 1e-5, 0.1),
        (torch.nan, 1.0),
    ],
)
def test_what_is_almost_right_is_wrong(value, expected):
    assert not agree(value, expected)


def test_the_tolerance_is_that_of_the_numbers_that_were_added():
    large, small = torch.tensor([1000.0, 1.0]), torch.tensor([-999.0, 1e-6])
    total = (large.double() + small.double()).float()
    off = total + torch.tensor([1e-4, 0.0])
    assert agree(off, total, [large, small])
    assert not agree(off, total)
    without_the_small = torch.tensor([total[0], 1.0])
    assert close(without_the_small, total, [large, small]).tolist() == [True, False]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_sum_that_cancels_is_compared_at_the_rounding_of_its_summands(shape):
    summands = [torch.full(shape, number) for number in (1.3, -0.9, 0.6, -0.99)]
    exact = torch.stack([summand.double() for summand in summands]).sum(0)
    assert agree(exact + 1e-7, exact, summands)
    assert not agree(exact + 1e-5, exact, summands)


def test_an_infinite_summand_allows_no_error():
    infinite = torch.tensor([torch.inf, 1.0])
    assert close(torch.tensor([0.0, 1.0]), infinite, [infinite]).tolist() == [False, True]


def test_a_value_of_another_kind_is_told():
    assert other_kind([1.0, 2.0, 3.0], ROW) is None
    assert "a list of 2, expected a tensor [3]" in str(other_kind([1.0, 2.0], ROW))
    assert "it is ['conv'], expected []" in str(other_kind(["conv"], []))
