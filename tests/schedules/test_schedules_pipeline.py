"""GPipe and 1F1B as the papers draw them, and the messages that they need."""

import itertools

import pytest

from labkit.schedules.pipeline import (
    PIPELINES,
    Action,
    Hop,
    gpipe,
    in_flight,
    one_f_one_b,
    with_hops,
)


def words(actions):
    return " ".join(map(str, actions))


def test_fill_and_drain_on_paper():
    for stage in range(3):
        assert words(gpipe(stage, 3, 3)) == "F0 F1 F2 B0 B1 B2"


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


def test_what_a_middle_stage_executes():
    found = list(with_hops(one_f_one_b(1, 3, 2), stage=1, num_stages=3))
    told = [
        " ".join(
            f"{way} {message.kind}{message.micro_batch}"
            for way, message in (("send", step.send), ("recv", step.recv))
            if message
        )
        if isinstance(step, Hop)
        else str(step)
        for step in found
    ]
    assert told == [
        "recv activation0", "F0", "send activation0",
        "recv activation1", "F1", "send activation1 recv gradient0",
        "B0", "send gradient0", "recv gradient1", "B1", "send gradient1",
    ]  # fmt: skip


def finishes(programs):
    """Play the stages' programs; a message passes only when both ends have reached it."""
    programs = [list(program) for program in programs]
    while any(programs):
        offers, wants = {}, {}
        for stage, program in enumerate(programs):
            while program and isinstance(program[0], Action):
                program.pop(0)
            if program:
                hop = program[0]
                if hop.send:
                    offers[stage, hop.send.peer] = hop.send[:2]
                if hop.recv:
                    wants[hop.recv.peer, stage] = hop.recv[:2]
        met = offers.keys() & wants.keys()
        if not met and any(programs):
            return False
        for edge in met:
            source, destination = edge
            assert offers[edge] == wants[edge], "the two ends name different messages"
            programs[source][0] = programs[source][0]._replace(send=None)
            programs[destination][0] = programs[destination][0]._replace(recv=None)
        for program in programs:
            if program and program[0] == (None, None):
                program.pop(0)
    return True


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_no_cycle_of_stages_waits_though_a_send_waits_for_its_receive(name, num_stages):
    for count, first_trained in itertools.product((1, 2, 3, 5, 8), range(num_stages)):
        streams = (PIPELINES[name](stage, num_stages, count) for stage in range(num_stages))
        assert finishes(
            with_hops(stream, stage, num_stages, first_trained)
            for stage, stream in enumerate(streams)
        )


def test_nothing_goes_back_to_stages_that_are_not_trained():
    for stage, sends in ((0, 0), (1, 0), (2, 4)):
        steps = list(with_hops(gpipe(stage, 3, 4), stage, 3, first_trained=1))
        hops = [step for step in steps if isinstance(step, Hop)]
        assert sum(hop.send is not None and hop.send.kind == "gradient" for hop in hops) == sends
        assert any(step[0] == "backward" for step in steps) == (stage >= 1)
