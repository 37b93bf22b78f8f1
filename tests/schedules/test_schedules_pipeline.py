"""Pipelines as the papers draw them, and the messages that they need."""

import itertools
import math
from dataclasses import replace

import pytest

from labkit.schedules.pipeline import (
    PIPELINES,
    Action,
    Hop,
    Pipelining,
    gpipe,
    in_flight,
    interleaved,
    pipeline_streams,
    stages_on_each,
    with_hops,
)
from labkit.schedules.timetable import instructions, predicted_slots


def words(actions):
    return " ".join(map(str, actions))


def test_interleaved_stages_take_turns_in_groups_of_as_many_micro_batches_as_ranks():
    """Megatron-LM's figure 4; a prime marks a rank's second stage."""
    assert words(interleaved(0, 4, 8)) == (
        "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' "
        "F5' B3' F6' B0 F7' B1 B2 B3 B4' B5' B6' B7' B4 B5 B6 B7"
    )
    assert words(interleaved(3, 4, 8)) == (
        "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 "
        "F6 B2 F7 B3 F4' B4' F5' B5' F6' B6' F7' B7' B4 B5 B6 B7"
    )


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12])
def test_a_rank_runs_each_action_once_and_holds_what_its_schedule_promises(name, count):
    for num_ranks, chunks in itertools.product((1, 2, 3, 4, 6), (2, 3)):
        kinds = ["backward", "forward"]
        if name == "zero_bubble":
            kinds = ["backward_input", "backward_weight", "forward"]
        chunks = chunks if name == "interleaved" else 1
        streams = pipeline_streams(name, num_ranks, count, stages_per_rank=chunks)
        for rank, actions in enumerate(streams):
            all_actions = itertools.product(kinds, range(count), range(chunks))
            assert sorted(actions) == list(all_actions)
            group = math.ceil(count / max(1, count // num_ranks))
            ahead = group * (chunks - 1) + 2 * (num_ranks - 1 - rank) + 1
            promised = {
                "gpipe": count,
                "1f1b": min(count, num_ranks - rank),
                "zero_bubble": min(count, num_ranks),
                "interleaved": min(count * chunks, ahead),
            }
            assert in_flight(actions) == promised[name]


def messages(hop):
    """The message at each end of a hop."""
    return [(way, *m) for way, m in (("send", hop.send), ("recv", hop.recv)) if m]


def finishes(programs):
    """Play the stages' hops; a message passes only when both ends have reached it."""
    todo = [
        [{(way, m[2]): m[:2] for way, *m in messages(hop)} for hop in program]
        for program in programs
    ]
    while any(todo):
        moved = False
        for stage, hops in enumerate(todo):
            for (way, peer), message in list(hops[0].items()) if hops else ():
                other = ("recv" if way == "send" else "send", stage)
                if todo[peer] and other in todo[peer][0]:
                    assert todo[peer][0].pop(other) == message, "the ends name different messages"
                    del hops[0][way, peer]
                    moved = True
        todo = [[hop for hop in hops if hop] for hops in todo]
        if not moved:
            return False
    return True


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_no_cycle_of_stages_waits_though_a_send_waits_for_its_receive(name, num_stages):
    for count, first_trained in itertools.product((1, 2, 3, 5, 8), range(num_stages)):
        programs = [
            with_hops(PIPELINES[name].actions(s, num_stages, count), s, num_stages, first_trained)
            for s in range(num_stages)
        ]
        assert finishes([step for step in row if isinstance(step, Hop)] for row in programs)


@pytest.mark.parametrize("name", ["zero_bubble", "interleaved"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_hops_beside_the_work_end_though_each_waits_for_the_one_before(name, num_ranks):
    """Each rank's hops move in the order of its program; an action waits for what it needs."""
    for count, chunks in itertools.product((1, 2, 3, 5, 8), (2, 3)):
        chunks = chunks if name == "interleaved" else 1
        for first_trained in {0, 1, num_ranks * chunks - 1}:
            sizes = num_ranks, count, first_trained, chunks
            todo = [[*instructions(PIPELINES[name], rank, *sizes)] for rank in range(num_ranks)]
            hops = [[step for step in row if isinstance(step, Hop)] for row in todo]
            coming = [{received(hop) for hop in row if hop.recv} for row in hops]
            queued = [[] for _ in todo]
            while any(todo) or any(queued):
                left = str((todo, queued))
                for rank, row in enumerate(todo):
                    while row and needed(row[0]) not in coming[rank]:
                        step = row.pop(0)
                        queued[rank] += [step] if isinstance(step, Hop) else []
                for rank, row in enumerate(queued):
                    peer = row[0].send.peer if row and row[0].send else rank
                    landing = queued[peer][0].recv if queued[peer] else None
                    if landing and landing.peer == rank:
                        assert landing[:2] == row.pop(0).send[:2]
                        coming[peer].remove(received(queued[peer].pop(0)))
                assert str((todo, queued)) != left, (name, sizes)


def received(hop):
    return hop.recv.kind, hop.recv.micro_batch, hop.recv.chunk


def needed(step):
    """The message that an action needs, if it is not made on its own rank."""
    kinds = {"forward": "activation", "backward": "gradient", "backward_input": "gradient"}
    return None if isinstance(step, Hop) else (kinds.get(step.kind), *step[1:])


def test_the_table_says_what_the_actions_are():
    for name, pipelining in PIPELINES.items():
        actions = list(itertools.chain.from_iterable(pipeline_streams(name, 2, 3)))
        assert pipelining.cuts_backward == any(a.kind == "backward_input" for a in actions)
        assert pipelining.interleaves == any(action.chunk for action in actions)
    with pytest.raises(ValueError, match="needs hops_beside"):
        Pipelining(interleaved, interleaves=True)


def turned_on_rank_1(rank, *sizes):
    for action in gpipe(rank, *sizes):
        yield action._replace(micro_batch=abs(2 * rank - action.micro_batch))


def test_a_schedule_that_is_no_training_step_is_refused():
    for name, index, times in itertools.product(PIPELINES, range(6), (0, 2)):
        first, second = pipeline_streams(name, 2, 3)
        first[index : index + 1] = times * [first[index]]
        with pytest.raises(ValueError, match="rank 0 of this schedule has"):
            PIPELINES[name].check([first, second], 3, stages_on_each(name))
    with pytest.raises(ValueError, match="needs cuts_backward=True"):
        replace(PIPELINES["zero_bubble"], cuts_backward=False).streams(2, 3)
    with pytest.raises(ValueError, match="hops_beside=True"):
        Pipelining(turned_on_rank_1).streams(2, 3)


def test_messages_that_would_wait_for_each_other_are_refused():
    """On paper this schedule ends; but a send between actions waits for its receive."""
    kinds = {"F": "forward", "B": "backward"}
    rows = []
    for row in ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 F2 F3 B1 B2 B3"):
        rows.append([Action(kinds[word[0]], int(word[1])) for word in row.split()])
    pipelining = Pipelining(lambda rank, *sizes: iter(rows[rank]))
    with pytest.raises(ValueError, match="rank 0 would send the activation of micro-batch 2"):
        instructions(pipelining, 0, 2, 4)
    assert len(instructions(replace(pipelining, hops_beside=True), 0, 2, 4)) == 16
    with pytest.raises(ValueError, match="2 transfers for 2 stages"):
        predicted_slots(rows, [1.0] * 2, [1.0] * 2, hop_s=[1.0] * 2)
