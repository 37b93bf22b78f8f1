"""Checks over several hosts: the bytes over each card, and a rendezvous that is drawn."""

import os
import time

import pytest
import torch.distributed as dist
from answers.hosts import around_all_ranks, as_on_the_page
from answers.rendezvous import as_on_the_page as meets, reads_the_environment, waits_for_rank_zero
from ranks import travel_by_value

from workbook import check
from workbook.exercises import hosts
from workbook.exercises.shared_store import SharedStore, untold, visit

travel_by_value(__name__)


def test_an_all_reduce_over_hosts_is_drawn():
    run = check.hosts.all_reduce(as_on_the_page, world_sizes=(4,)).own_run()
    assert run.sentence.startswith("passed")
    assert run.figure is not None
    flat = check.hosts.all_reduce(around_all_ranks, world_sizes=(5,))
    assert "leave host 0 by its card" in repr(flat)
    assert flat.own_run(5).figure is not None


# The rendezvous


def test_a_rendezvous_is_drawn_in_the_order_in_which_the_processes_came():
    run = check.rendezvous.meet(meets, world_sizes=(2,)).own_run(3)
    assert run.sentence == "passed, in 15 operations on the store."
    assert run.rows["rank"] == ["0", "1", "2"]
    assert [run.rows[op] for op in ("add", "set", "get")] == [["1"] * 3, ["1"] * 3, ["3"] * 3]
    assert "wait" in run.figure.alt


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (waits_for_rank_zero, "not right yet, in "),
        (reads_the_environment, "it did not finish"),
        (lambda store, address, world_size, attempt: (0, []), "the store was not used"),
    ],
)
def test_a_rendezvous_that_fails_says_so(fn, said):
    verdict = check.rendezvous.meet(fn, world_sizes=(2,))
    assert verdict.own_run(2).sentence.startswith(said)


def test_a_wait_for_a_key_that_nobody_sets_ends(monkeypatch):
    monkeypatch.setattr("workbook.exercises.shared_store._PATIENCE_S", 0.05)
    store = SharedStore(dist.HashStore())
    found = visit(waits_for_rank_zero, store, "here", 2, 0)
    assert found.result is None
    assert found.waited_for == "0/0"
    assert [use.op for use in found.uses] == ["add", "set"]


def test_its_uses_are_noted_under_any_store_of_pytorch():
    store = SharedStore(dist.HashStore())
    own = dist.PrefixStore("mine", store)
    own.set("a", "1")
    assert own.get("a") == b"1"
    assert own.compare_set("b", "", "2") == b"2"
    assert own.check(["a", "b"])
    assert own.add("n", 3) == 3
    store.multi_set(["c"], ["4"])
    assert store.multi_get(["c", "mine/a"]) == [b"4", b"1"]
    assert store.delete_key("c")
    assert store.num_keys() >= 3
    assert [use.op for use in store.uses[:4]] == ["set", "get", "compare_set", "check"]
    assert store.uses[0].key == "mine/a"
    assert store.uses[-1].start_s <= store.uses[-1].end_s <= time.monotonic()


def test_a_process_is_not_told_its_rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with untold():
        assert "RANK" not in os.environ
    assert os.environ["RANK"] == "3"


@pytest.mark.parametrize(
    ("text", "tasks"), [("2(x3),1", [2, 2, 2, 1]), ("12", [12]), ("3,1(x2),4", [3, 1, 1, 4])]
)
def test_tasks_as_slurm_writes_them(text, tasks):
    assert hosts._tasks(text) == tasks
