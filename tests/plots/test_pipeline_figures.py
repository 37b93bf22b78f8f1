from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from parts import boxes_of, lanes_of, legend_of, spans_of

from labkit.comm.peak_memory import PeakMemory
from labkit.costs.pipeline_timeline import bubble, predicted_slots
from labkit.schedules.pipeline import PIPELINES
from labkit.tracing import Span, Trace
from workbook import plots
from workbook.plots.palette import STYLES


def streams_of(schedule, stages, micro_batches):
    return [list(PIPELINES[schedule](s, stages, micro_batches)) for s in range(stages)]


GPIPE, ONE_F_ONE_B = (streams_of(name, 2, 2) for name in ("gpipe", "1f1b"))
# Two stages, two micro-batches, forward 1 and backward 2: worked out by hand.
#   stage 0   F0 F1 -- -- B0 B0 -- B1 B1      (1f1b: the same here)
#   stage 1   -- F0 B0 B0 F1 B1 B1 -- --
SLOTS = predicted_slots(ONE_F_ONE_B, [1, 1], [2, 2])
ROWS = [
    {"schedule": "gpipe", "micro_batches": 4, "step_s": [6, 7, 8, 9, 30], "model_s": 5.0},
    {"schedule": "gpipe", "micro_batches": 1, "step_s": 10.0, "model_s": 8.0},
    {"schedule": "1f1b", "micro_batches": 1, "step_s": 9.5, "memory_bytes": [2**20, 3 * 2**20]},
    {"schedule": "1f1b", "micro_batches": 4, "step_s": 8.5, "memory_bytes": [2**20, 2**20]},
]


def words_of(figure):
    """By row, what stands on its boxes from left to right."""
    rows = {}
    for text in sorted(figure.figure.axes[0].texts, key=lambda text: text.get_position()):
        rows.setdefault(text.get_position()[1], []).append(text.get_text())
    return rows


def ran(streams, steps=3, start_s=5.0):
    """A trace of these steps: forwards take 10 ms, backwards 20, hops 1, and a pause between."""
    slots = predicted_slots(streams, [0.01] * len(streams), [0.02] * len(streams), [0.001])
    spans = []
    for step in range(steps):
        begun = start_s + step * 0.5
        for slot in slots:
            times = begun + slot.start_s, begun + slot.end_s
            spans.append(Span(slot.stage, slot.kind, *times))
        spans.append(Span(0, "communicate", begun + 0.02, begun + 0.021, 8, 1))
        spans.append(Span(1, "wait", begun, begun + 0.01, 0, 0))
        # Marks, updates and meetings are not a part of the pipeline.
        spans += [Span(rank, "data", begun, begun + 1e-7) for rank in (0, 1)]
        spans += [Span(rank, "update", begun + 0.3, begun + 0.31) for rank in (0, 1)]
    return Trace.merge([spans])


class TestTimetable:
    def test_boxes_are_the_slots_and_idle_fills_the_rest(self):
        figure = plots.pipeline_timetable(SLOTS, unit="forwards")
        boxes = [(round(b[2:].mean()), *map(float, b[:2])) for b in boxes_of(figure)]
        by_row = {row: sorted(box[1:] for box in boxes if box[0] == row) for row in (0, 1)}
        assert by_row[0] == [(0, 1), (1, 2), (2, 4), (4, 6), (6, 7), (7, 9)]
        assert by_row[1] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 7), (7, 9)]
        colors = dict(zip(boxes, map(tuple, spans_of(figure).get_facecolors())))
        forward, backward, idle = (colors[place] for place in ((0, 0, 1), (0, 4, 6), (0, 2, 4)))
        assert len({forward, backward, idle}) == 3
        assert (colors[1, 2, 4], colors[1, 0, 1]) == (backward, idle)

    def test_the_rows_read_like_the_streams_as_far_as_there_is_room(self):
        for streams in (GPIPE, ONE_F_ONE_B, streams_of("1f1b", 4, 3)):
            slots = predicted_slots(streams, [1] * len(streams), [2] * len(streams))
            words = words_of(plots.pipeline_timetable(slots))
            assert words == {row: list(map(str, stream)) for row, stream in enumerate(streams)}
        narrow = predicted_slots(streams_of("gpipe", 2, 16), [1, 1], [2, 2])
        words = words_of(plots.pipeline_timetable(narrow))[0]
        assert (words[:3], words[-2:]) == (["0", "1", "2"], ["B14", "B15"])

    def test_it_says_model_its_unit_the_bubble_and_what_is_held(self):
        figure = plots.pipeline_timetable(SLOTS, title="1F1B", unit="forwards")
        assert legend_of(figure) == ["forward (model)", "backward (model)", "idle (model)"]
        axes = figure.figure.axes[0]
        assert (axes.get_title("left"), axes.get_xlabel()) == ("1F1B (model)", "time (forwards)")
        hatches = {c.get_hatch() for c in axes.collections} - {None}
        assert hatches == {STYLES["forward"].model.hatch}
        assert "stage 0 F0 F1 B0 B1; stage 1 F0 B0 F1 B1" in figure.alt
        assert "9 forwards, and stages are idle for 33%" in figure.alt
        assert "(P - 1) / (M + P - 1) = 33%" in figure.caption
        assert "at most 2, 1 micro-batches are held" in figure.caption


class TestTimeline:
    @pytest.mark.parametrize("streams", [GPIPE, ONE_F_ONE_B])
    def test_the_kth_forward_is_the_kth_of_its_stream(self, streams):
        figure = plots.pipeline_timeline(ran(streams), streams)
        assert words_of(figure) == {row: list(map(str, s)) for row, s in enumerate(streams)}

    def test_it_shows_one_step_from_its_own_start_to_its_end_on_every_stage(self):
        figure = plots.pipeline_timeline(ran(ONE_F_ONE_B), ONE_F_ONE_B)
        boxes = boxes_of(figure)
        # Two hops of 1 ms each way on the longest path; a stage that is done waits for the end.
        for row in (0, 1):
            mine = boxes[boxes[:, 2:].mean(axis=1).round() == row]
            assert (mine[:, 0].min(), mine[:, 1].max()) == (pytest.approx(0), pytest.approx(92))
        assert legend_of(figure) == ["forward", "backward", "communicate", "wait"]
        assert figure.caption.startswith("Measured: the step takes 92 ms")

    def test_a_stage_has_its_device_and_its_peak_memory(self):
        trace = replace(ran(GPIPE), devices={0: "cuda:0", 1: "cuda:0"})
        result = SimpleNamespace(trace=trace, peak_memory=[PeakMemory(2**20), PeakMemory(2**10)])
        figure = plots.pipeline_timeline(result, GPIPE)
        assert lanes_of(figure) == ["0 · cuda:0\n1 MiB", "1 · cuda:0\n1 KiB"]
        assert figure.figure.axes[0].get_ylabel() == "stage · device,\npeak memory"
        assert "stage 1 · cuda:0, 1 KiB F0 F1" in figure.alt

    def test_the_measured_bubble_is_that_of_the_slots(self):
        expected = predicted_slots(ONE_F_ONE_B, [0.01] * 2, [0.02] * 2, [0.001])
        found = plots.measured_slots(ran(ONE_F_ONE_B), ONE_F_ONE_B)
        assert [slot[:3] for slot in found] == [slot[:3] for slot in expected]
        assert bubble(found) == pytest.approx(bubble(expected))

    def test_every_step_can_be_shown_and_other_streams_are_refused(self):
        trace = ran(GPIPE)
        starts = [plots.measured_slots(trace, GPIPE, step=k)[0].start_s for k in (0, 1, 2, -1)]
        assert starts == pytest.approx([5.0, 5.5, 6.0, 6.0])
        with pytest.raises(ValueError, match=r"no step 3: .* ran 3 steps"):
            plots.measured_slots(trace, GPIPE, step=3)
        with pytest.raises(ValueError, match=r"rank 1 ran 12 .*stream's 4"):
            plots.measured_slots(trace, ONE_F_ONE_B)
        with pytest.raises(ValueError, match=r"rank 0 ran 12 .*stream's 8"):
            plots.measured_slots(trace, streams_of("gpipe", 2, 4))


class TestStepByMicroBatches:
    def test_points_are_medians_and_bands_the_middle_half(self):
        figure = plots.step_by_micro_batches(ROWS)
        axes, memory = figure.figure.axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        assert lines["gpipe"] == [[1, 10], [4, 8]]
        assert lines["gpipe model"] == [[1, 8], [4, 5]]
        assert lines["1f1b"] == [[1, 9.5], [4, 8.5]]
        ys = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (ys.min(), ys.max()) == (7, 10)
        curves = [line.get_xydata() for line in memory.lines if len(line.get_xdata())]
        np.testing.assert_allclose(curves, [[[1, 3], [4, 1]]])
        assert memory.get_ylabel() == "memory (MiB)"
        assert len(plots.step_by_micro_batches(ROWS[:2]).figure.axes) == 1
