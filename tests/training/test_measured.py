"""Links and split models measured on real processes: what is counted is exact."""

import pytest
from torch import nn

from labkit.costs.link import Link
from labkit.engine.tracing.spans import STEP_KINDS
from labkit.schedules.pipeline import pipeline_streams
from labkit.training.measured import measure_link, measure_split
from labkit.workload.layers import EmulatedLayer

SIZES = (2**10, 2**20)
SMALL = {"batch_size": 6, "input_shape": (1, 8, 8), "steps": 2}


def link_of(**options):
    return measure_link(sizes_bytes=SIZES, repeats=3, device="cpu", **options)


def test_a_ping_pong_between_two_ranks():
    link = link_of(transport="gloo")
    assert isinstance(link, Link)
    # On a busy machine three small sizes may take the same time: beta is then 0.
    assert link.beta_s_per_byte >= 0 == link.gamma_s_per_byte
    assert {size: len(times) for size, times in link.seconds.items()} == dict.fromkeys(SIZES, 3)
    assert str(link).endswith("(ping-pong, 2 ranks, gloo, 1 KiB to 1 MiB, medians of 3)")


def test_bytes_and_hops_of_a_pipeline():
    found = measure_split("small_cnn", (3, 5), micro_batches=4, schedule="1f1b", **SMALL)
    # What layers 2 and 4 hand on: 32 and 64 channels of 4x4 pixels.
    assert found.hop_bytes == [6 * 32 * 16 * 4, 6 * 64 * 16 * 4]
    assert [len(hops) for hops in found.forward_hop_s + found.backward_hop_s] == [2] * 4
    assert all(s > 0 for hops in found.forward_hop_s + found.backward_hop_s for s in hops)
    assert len(found.step_s) == 2
    for stage in range(3):
        forwards = found.trace.of(stage, "forward")
        assert len(forwards) == len(found.trace.of(stage, "backward")) == 2 * 4
        assert sum(span.duration_s for span in forwards) <= sum(found.step_s)
    # One step alone, without the marks between steps.
    step = found.typical_step()
    assert {*step.kinds} == {"forward", "backward", "communicate", "wait", "update"}
    assert len(step.of(kind="update")) == 3


@pytest.mark.parametrize(("schedule", "chunks"), [("zero_bubble", 1), ("interleaved", 2)])
def test_ranks_run_their_streams_while_messages_move_beside_them(schedule, chunks):
    model = nn.Sequential(*(EmulatedLayer(0.001) for _ in range(3 * chunks)))
    batch = {"batch_size": 7, "input_shape": (4,), "steps": 1, "device": "cpu"}
    points = range(1, 3 * chunks)
    found = measure_split(model, points, micro_batches=5, schedule=schedule, **batch)
    for rank, stream in enumerate(pipeline_streams(schedule, 3, 5)):
        ran = [span for span in found.trace.of(rank, lane=0) if span.kind in STEP_KINDS]
        assert [span.kind for span in ran] == [action.kind for action in stream]
        assert {span.lane for span in found.trace.of(rank, "communicate")} == {1}
    # 16 bytes a sample cross each cut.
    assert found.hop_bytes == [7 * 16 * chunks] * 2
