"""GPipe and 1F1B as the papers draw them, and the messages that they need."""

import itertools

import pytest

from labkit.schedules.pipeline import PIPELINES, Hop, in_flight, one_f_one_b, with_hops


def words(actions):
    return " ".join(map(str, actions))


def test_one_forward_one_backward_on_paper():
    assert words(one_f_one_b(0, 3, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(one_f_one_b(1, 3, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(one_f_one_b(2, 3, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12])
def test_a_stage_runs_each_action_once_and_holds_what_its_schedule_promises(name, count):
    for num_stages in (1, 2, 3, 4, 6):
        for stage in range(num_stages):
            actions = list(PIPELINES[name](stage, num_stages, count))
            assert sorted(actions) == list(
                itertools.product(["backward", "forward"], range(count))
            )
            promised = {"gpipe": count, "1f1b": min(count, num_stages - stage)}
            assert in_flight(actions) == promised[name]


def messages(hop):
    """The message at each end of a hop."""
    return [(way, *m) for way, m in (("send", hop.send), ("recv", hop.recv)) if m]


def finishes(programs):
    """Play the stages' hops; a message passes only when both ends have reached it."""
    todo = [
        [{(way, m[-1]): m[:2] for way, *m in messages(hop)} for hop in program]
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


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_no_cycle_of_stages_waits_though_a_send_waits_for_its_receive(name, num_stages):
    for count, first_trained in itertools.product((1, 2, 3, 5, 8), range(num_stages)):
        programs = [
            with_hops(PIPELINES[name](s, num_stages, count), s, num_stages, first_trained)
            for s in range(num_stages)
        ]
        assert finishes([step for step in row if isinstance(step, Hop)] for row in programs)
