"""Pipelines on paper: the papers' pictures, the bubble's formula, streams that never end."""

import random

import pytest

from labkit.costs.makespan import makespan_s, pipeline_streams
from labkit.costs.pipeline_timeline import Slot, bubble, bubble_formula, predicted_slots
from labkit.schedules.pipeline import PIPELINES, Action, gpipe, one_f_one_b


def picture(schedule, num_stages, num_micro_batches, backward_s=1):
    """One row per stage, one column per second, as the papers draw it."""
    streams = streams_of(schedule, num_stages, num_micro_batches)
    slots = predicted_slots(streams, [1] * num_stages, [backward_s] * num_stages)
    rows = [["."] * int(max(slot.end_s for slot in slots)) for _ in range(num_stages)]
    for slot in slots:
        for second in range(int(slot.start_s), int(slot.end_s)):
            rows[slot.stage][second] = str(Action(slot.kind, slot.micro_batch))
    return [" ".join(f"{cell:2}" for cell in row).rstrip() for row in rows]


def streams_of(schedule, num_stages, num_micro_batches):
    return [list(schedule(s, num_stages, num_micro_batches)) for s in range(num_stages)]


def test_one_forward_one_backward_with_backward_twice_as_long():
    assert picture(one_f_one_b, 3, 4, backward_s=2) == [
        "F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3",
        ".  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .",
        ".  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .",
    ]


@pytest.mark.parametrize("schedule", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_equal_stages_and_free_hops_have_the_bubble_of_the_formula(schedule, num_stages):
    for num_micro_batches in (1, 2, 4, 9):
        streams = streams_of(schedule, num_stages, num_micro_batches)
        slots = predicted_slots(streams, [2] * num_stages, [4] * num_stages)
        due = bubble_formula(num_stages, num_micro_batches)
        assert bubble(slots) == pytest.approx(due)


def test_a_hop_delays_the_neighbour_and_occupies_no_stage():
    slots = predicted_slots(streams_of(gpipe, 2, 2), [1, 1], [1, 1], hop_s=[0.5])
    assert slots[:2] == [Slot(0, "forward", 0, 0, 1), Slot(0, "forward", 1, 1, 2)]
    stage_1 = [(slot.start_s, slot.end_s) for slot in slots if slot.stage == 1]
    assert stage_1 == [(1.5, 2.5), (2.5, 3.5), (3.5, 4.5), (4.5, 5.5)]
    assert max(slot.end_s for slot in slots) == 7  # B1's gradient leaves at 5.5 and takes 0.5


def test_streams_that_can_never_finish_are_told_apart():
    forward, backward = Action("forward", 0), Action("backward", 0)
    with pytest.raises(ValueError, match="stage 0 cannot run B0 before its own F0"):
        predicted_slots([[backward, forward]], [1], [1])
    crossed = [
        [forward, backward, Action("forward", 1), Action("backward", 1)],
        [forward, Action("forward", 1), backward, Action("backward", 1)],
    ]
    expected = "stage 0 cannot run B0 before B0 of stage 1; stage 1 cannot run F1 before F1 of"
    with pytest.raises(ValueError, match=expected + " stage 0"):
        predicted_slots(crossed, [1, 1], [1, 1])
    with pytest.raises(ValueError, match="stage 0 cannot run B0 before B0 of stage 1"):
        predicted_slots([[forward, backward], [forward]], [1, 1], [1, 1])
    with pytest.raises(ValueError, match="stage 0 runs F0 more than once"):
        predicted_slots([[forward, forward, backward]], [1], [1])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_it_ends_with_the_last_slot(schedule, num_stages):
    draw = random.Random(num_stages)
    for micro_batches in (1, 2, 3, 8):
        for first_trained in range(num_stages + 1):
            forward_s, backward_s = ([draw.random() for _ in range(num_stages)] for _ in range(2))
            hop_s = [draw.random() for _ in range(num_stages - 1)]
            streams = pipeline_streams(schedule, num_stages, micro_batches, first_trained)
            slots = predicted_slots(streams, forward_s, backward_s, hop_s)
            end_s = makespan_s(
                schedule, micro_batches, forward_s, backward_s, hop_s, first_trained
            )
            assert end_s == max(slot.end_s for slot in slots)


def test_frozen_stages_have_no_backward():
    streams = pipeline_streams("1f1b", 3, 2, first_trained=1)
    assert [" ".join(map(str, stream)) for stream in streams] == [
        "F0 F1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]
    # Two forwards on stage 0, a hop, stage 1, a hop, stage 2, and back to stage 1 only.
    assert makespan_s("gpipe", 1, [1, 1, 1], [7, 2, 2], [0.5, 0.5], first_trained=1) == 8.5


def test_seconds_for_every_stage():
    with pytest.raises(ValueError, match="backward_s has length 2: with 3 stages give 3"):
        predicted_slots(streams_of(gpipe, 3, 2), [1] * 3, [1] * 2)
