"""Checks over several hosts: the bytes over each card, and a rendezvous that is drawn."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from answers.hosts import around_all_ranks, as_on_the_page
from answers.rendezvous import as_on_the_page as meets, reads_the_environment, waits_for_rank_zero
from ranks import travel_by_value
from workbook.exercises.grader.judge_cards import bytes_out, cell
from workbook.exercises.grader.shared_store import SharedStore, untold, visit

import labkit
from labkit.collectives import hierarchical_all_reduce, ring_all_reduce
from workbook import check
from workbook.exercises import hosts
from workbook.exercises.grader import Case
from workbook.exercises.grader.exercise import Cards

travel_by_value(__name__)

TWO_AND_ONE = Cards(((0, 1), (2,)), [0, 0], [0, 0])


def test_only_what_goes_to_another_host_leaves_by_the_card():
    sent_to = [{1: 100, 2: 10}, {0: 1000, 2: 1}, {0: 5, 1: 2}]
    assert bytes_out(TWO_AND_ONE, sent_to) == [11, 7]
    assert cell([7, 7]) == "7 B"
    assert cell([11, 7]) == "11 B  7 B"


def sent_over_hosts(comm, case):
    counts = []
    for all_reduce in (ring_all_reduce, hierarchical_all_reduce):
        before = comm.bytes_to.copy()
        comm.hosts = hosts.hosts_of(case)
        all_reduce(comm, torch.ones(case.size))
        counts.append(dict(comm.bytes_to - before))
    return counts


@pytest.mark.parametrize("world_size", [4, 5, 6])
def test_the_targets_are_what_labkit_s_own_functions_send(world_size):
    case = Case(world_size, 240)
    cards = hosts._cards(case)
    assert sum(map(len, cards.hosts)) == world_size
    by_rank = labkit.run(sent_over_hosts, case, world_size=world_size, device="cpu").values
    flat, over = (bytes_out(cards, sent) for sent in zip(*by_rank))
    assert flat == cards.flat_bytes
    assert over == cards.num_bytes


def test_an_all_reduce_over_hosts_is_drawn_beside_its_target_and_the_flat_ring():
    run = check.hosts.all_reduce(as_on_the_page, world_sizes=(4,)).own_run()
    assert run.sentence.startswith("passed, with exactly the card bytes of the target.")
    assert run.columns == ["yours", "target", "labkit"]
    assert run.rows["card bytes"] == ["3.81 MiB"] * 3
    assert "one ring through all ranks has 5.72 MiB of them" in run.caption
    assert run.figure is not None


def test_without_the_four_ranks_of_its_link_it_is_drawn_all_the_same():
    run = check.hosts.all_reduce(around_all_ranks, world_sizes=(5,)).own_run(5)
    assert run.sentence.startswith("not right yet, with 1.6 times the card bytes of the target.")
    assert run.rows["card bytes"][1] == "3.81 MiB"


# The rendezvous


def test_a_rendezvous_is_drawn_in_the_order_in_which_the_processes_came():
    run = check.rendezvous.meet(meets, world_sizes=(2,)).own_run(3)
    assert run.sentence == "passed, in 15 operations on the store."
    assert run.columns == ["1st", "2nd", "3rd"]
    assert run.rows["rank"] == ["0", "1", "2"]
    assert [run.rows[op] for op in ("add", "set", "get")] == [["1"] * 3, ["1"] * 3, ["3"] * 3]
    assert "wait" in run.figure.alt


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (waits_for_rank_zero, "not right yet, in "),
        (reads_the_environment, "it did not finish, so there is nothing to draw.\nrank"),
        (lambda store, address, world_size, attempt: (0, []), "the store was not used"),
    ],
)
def test_a_rendezvous_that_fails_says_so(fn, said):
    verdict = check.rendezvous.meet(fn, world_sizes=(2,))
    assert verdict.own_run(2).sentence.startswith(said)


def test_a_wait_for_a_key_that_nobody_sets_ends(monkeypatch):
    monkeypatch.setattr("workbook.exercises.grader.shared_store._PATIENCE_S", 0.05)
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
