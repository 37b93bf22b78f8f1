"""The public names of the packages, listed once, in __init__.pyi, which editors also read."""

import sys
from functools import partial

import pytest

import labkit
import workbook


def test_every_public_name_is_there():
    assert len(labkit.__all__) > 20
    for package in (labkit, workbook):
        assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert not set(labkit.__all__) & set(workbook.__all__)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (partial(labkit.train_with, "ddp", bach_size=64), "batch_size"),
        (partial(labkit.train_with, "ddp", timeout=64), "timeout_s"),
        (partial(labkit.run, print, wrld_size=2), "world_size"),
        (partial(labkit.warm_up, train=True), "training"),
        (partial(labkit.RunConfig, epoch=2), "epochs"),
        (partial(labkit.load_dataset, "digits", trainsize=9), "train_size"),
        (partial(labkit.build_model, "small_cnn", num_class=2), "num_classes"),
        (partial(workbook.predict_row, "t", "s", predicted=2), "prediction"),
        (partial(workbook.check.returns, print, mistake=2), "mistakes"),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_closest_one(call, meant):
    keyword = next(iter(call.keywords))
    with pytest.raises(TypeError, match="unexpected keyword argument") as caught:
        call()
    assert f"{keyword!r} (did you mean {meant!r}?)" in str(caught.value)


def test_an_unknown_keyword_like_no_other_is_answered_with_all():
    with pytest.raises(TypeError, match="'cores': it takes fn, args, world_size, device, "):
        labkit.run(print, cores=2)


@pytest.mark.parametrize(
    ("module", "mistyped", "meant"),
    [
        ("labkit", "trian_with", "train_with"),
        ("workbook.plots", "timline", "timeline"),
        ("workbook.check", "rng", "ring"),
        ("workbook.widgets", "ring_steper", "ring_stepper"),
        ("labkit.collectives", "ring_allreduce", "ring_all_reduce"),
    ],
)
def test_an_unknown_name_of_a_module_is_answered_with_the_closest_one(module, mistyped, meant):
    with pytest.raises(AttributeError, match=f"'{mistyped}' .did you mean '{meant}'"):
        getattr(sys.modules[module], mistyped)
    assert not hasattr(labkit, "xyz")
