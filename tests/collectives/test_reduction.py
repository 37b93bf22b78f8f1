"""Reductions without ranks: which are refused, in which dtype they add, what they compute."""

import warnings

import pytest
import torch

from labkit.collectives.reduction import ADDABLE, COMBINE, WIDE, Reduction

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
STORAGE_ONLY = ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"]


def ones(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental, says torch
        return torch.ones(3).to(dtype)


def combined(op, mine, incoming):
    reduction = Reduction.of(op, mine)
    mine, incoming = mine.to(reduction.wide), incoming.to(reduction.wide)
    return reduction.combine(mine, incoming, out=torch.empty_like(mine))


@pytest.mark.parametrize("dtype", sorted(ADDABLE, key=str), ids=str)
def test_what_may_be_summed_can_be_summed(dtype):
    total = combined("sum", ones(dtype), ones(dtype)).to(torch.complex128)
    assert torch.equal(total, (ones(dtype) + ones(dtype)).to(torch.complex128))


@pytest.mark.parametrize("name", STORAGE_ONLY)
@pytest.mark.parametrize("op", sorted(COMBINE))
def test_dtypes_that_only_store_are_refused_by_name(name, op):
    tensor = torch.zeros(3).to(getattr(torch, name))
    with pytest.raises((RuntimeError, NotImplementedError)):
        tensor + tensor  # the refusal can go if torch learns to add these
    with pytest.raises(ValueError, match=rf"{op} of {name} over ranks: .*\.float\(\)"):
        Reduction.of(op, tensor)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS], ids=str)
def test_an_integer_mean_is_refused_and_the_rest_is_not(dtype):
    with pytest.raises(ValueError, match=r"mean of .*a mean is not an integer; take the sum"):
        Reduction.of("mean", ones(dtype))
    for op in COMBINE.keys() - {"mean"}:
        assert Reduction.of(op, ones(dtype)).wide == dtype


def test_sixteen_bits_are_added_in_thirty_two_and_compared_as_they_are():
    for dtype in (torch.float16, torch.bfloat16):
        for op in ("sum", "mean", "product"):
            assert Reduction.of(op, ones(dtype)).wide == torch.float32
        for op in ("max", "min"):
            assert Reduction.of(op, ones(dtype)).wide == dtype
    for dtype in ADDABLE - WIDE.keys():
        assert Reduction.of("sum", ones(dtype)).wide == dtype


def test_not_a_number_overflow_and_wrap_are_pytorchs_own():  # row 12
    nan = torch.tensor([float("nan"), 1.0])
    for op in ("sum", "mean", "max", "min"):
        for pair in ((nan, torch.zeros(2)), (torch.zeros(2), nan)):
            assert combined(op, *pair).isnan().tolist() == [True, False]
    large = torch.tensor([60000.0], dtype=torch.float16)
    assert combined("sum", large, large).to(torch.float16).isinf().all()
    assert combined("sum", *[torch.tensor([200], dtype=torch.uint8)] * 2).tolist() == [144]
