"""The choice of page 16: plausible layouts that are wrong are told why."""

import pytest

from workbook.exercises import choosing
from workbook.exercises.choosing import CASES, choose, ranked


@pytest.mark.parametrize("name", CASES)
def test_the_best_layout_of_each_case_passes_and_shows_the_ranking(name, capsys):
    best = ranked(name)[0]
    how = {field: getattr(best.layout, field) for field in ("dp", "tp", "pp", "stage")}
    assert choose(name, **how, micro_batch=best.layout.micro_batch).passed
    assert f"{best.layout} " in capsys.readouterr().out
    assert not choose(name).passed
    assert CASES[name][0] in capsys.readouterr().out


def test_each_case_is_won_by_a_technique_of_its_own():
    won = {name: ranked(name)[0].layout for name in CASES}
    assert {name: (one.dp, one.tp, one.pp, one.stage) for name, one in won.items()} == {
        "small": (8, 1, 1, 0),  # data parallel
        "medium": (8, 1, 1, 1),  # sharded
        "long": (2, 4, 1, 1),  # tensor parallel
        "scattered": (4, 1, 4, 0),  # pipeline
        "large": (1, 8, 8, 0),  # a mesh
    }


WRONG = {
    "too large as a replica": ("medium", {"dp": 8}, "does not fit", "most of it optimizer"),
    "the layer is cut, where sharding is enough": ("medium", {"dp": 4, "tp": 2}, "all-reduces"),
    "sharded, but one sample is too large": (
        *("long", {"dp": 8, "stage": 3}, "does not fit", "most of it activations"),
    ),
    "computed again, where cutting is quicker": (
        *("long", {"dp": 8, "stage": 3, "recompute": "full"}, "computed again"),
    ),
    "cut more than it takes": ("small", {"dp": 2, "tp": 4, "micro_batch": 8}, "all-reduces"),
    "everything over slow cards": ("scattered", {"dp": 16, "stage": 1}, "travel between"),
    "too many stages": ("scattered", {"pp": 16}, "messages between stages"),
    "sharded over hosts, gathered for each micro-batch": (
        *("large", {"dp": 8, "tp": 8, "stage": 3}, "travel between"),
    ),
    "a bubble": ("large", {"dp": 1, "tp": 2, "pp": 32}, "does not fit"),
    "more GPUs than there are": ("medium", {"dp": 8, "tp": 2}, "16 GPUs, the cluster has 8"),
    "a word that is none": ("medium", {"data": 8}, "unknown field 'data'"),
}


@pytest.mark.parametrize(("name", "layout", "reasons"), [(n, w, r) for n, w, *r in WRONG.values()])
def test_a_plausible_wrong_choice_is_told_why(name, layout, reasons, capsys):
    verdict = choose(name, **layout)
    said = " ".join(capsys.readouterr().out.split())
    assert not verdict.passed
    assert all(reason in said for reason in reasons), said


def test_an_unknown_case_is_refused():
    with pytest.raises(ValueError, match="'tiny'"):
        choosing.choose("tiny")
