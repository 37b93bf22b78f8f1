"""Pipelines on paper: the papers' pictures, the bubble's formula, streams that never end."""

import pytest

from labkit.costs.pipeline_timeline import Slot, bubble, bubble_formula, predicted_slots
from labkit.schedules.pipeline import PIPELINES, Action, pipeline_streams


def test_one_forward_one_backward_with_backward_twice_as_long():
    slots = predicted_slots(pipeline_streams("1f1b", 3, 4), [1] * 3, [2] * 3)
    rows = [["."] * 18 for _ in range(3)]
    for slot in slots:
        for second in range(int(slot.start_s), int(slot.end_s)):
            rows[slot.stage][second] = str(Action(slot.kind, slot.micro_batch))
    assert [" ".join(f"{cell:2}" for cell in row).rstrip() for row in rows] == [
        "F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3",
        ".  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .",
        ".  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .",
    ]


@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_equal_stages_and_free_hops_have_the_bubble_of_the_formula(schedule, num_stages):
    for count in (1, 2, 4, 9):
        streams = pipeline_streams(schedule, num_stages, count)
        slots = predicted_slots(streams, [2] * num_stages, [4] * num_stages)
        assert bubble(slots) == pytest.approx(bubble_formula(num_stages, count))


def test_a_hop_delays_the_neighbour_and_occupies_no_stage():
    slots = predicted_slots(pipeline_streams("gpipe", 2, 2), [1, 1], [1, 1], hop_s=[0.5])
    assert slots[:2] == [Slot(0, "forward", 0, 0, 1), Slot(0, "forward", 1, 1, 2)]
    stage_1 = [(slot.start_s, slot.end_s) for slot in slots if slot.stage == 1]
    assert stage_1 == [(1.5, 2.5), (2.5, 3.5), (3.5, 4.5), (4.5, 5.5)]
    assert max(slot.end_s for slot in slots) == 7  # B1's gradient leaves at 5.5 and takes 0.5
