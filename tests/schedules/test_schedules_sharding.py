"""The order of sharding: what is whole when it is used, and the drawing in the module."""

import itertools

import pytest

from labkit.schedules import sharding
from labkit.schedules.sharding import sharded_pass

TIED = (0,), (1,), (2, 1), (0,)


def test_the_drawing_of_a_step_of_three_units():
    stream = sharded_pass(3, [(0,), (1,), (2,)], (0, 1, 2))
    text = ", ".join(f"{kind} {number}" for kind, number in stream)
    assert text in " ".join(sharding.__doc__.split())


@pytest.mark.parametrize("trained", [(0, 1, 2), (2,), (1,)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_unit_uses_is_whole_and_each_gradient_is_reduced_once(stage, trained):
    whole, most, sums = set(), 0, []
    for kind, number in sharded_pass(stage, TIED, trained):
        if kind in ("forward", "backward") and stage == 3:
            assert whole >= {*TIED[number]}
        if kind == "gather":
            assert number not in whole
            whole.add(number)
        elif kind == "free":
            whole.remove(number)
        most = max(most, len(whole))
        sums += [(kind, number)] * (kind in ("begin", "reduce", "finish"))
    assert not whole
    assert most == (3 if stage == 3 else 0)
    kinds = itertools.product(("begin", "reduce", "finish"), trained)
    assert sorted(sums) == sorted(kinds)
