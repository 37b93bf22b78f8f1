from dataclasses import replace
from types import SimpleNamespace

import pytest
from parts import legend_of

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


def boxes_of(figure):
    """(row, left, right) of each box, with its color."""
    (collection,) = [c for c in figure.figure.axes[0].collections if c.get_gid() == "spans"]
    boxes = [path.get_extents() for path in collection.get_paths()]
    places = [(round((b.y0 + b.y1) / 2), b.x0, b.x1) for b in boxes]
    return dict(zip(places, map(tuple, collection.get_facecolors())))


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
        boxes = boxes_of(plots.pipeline_timetable(SLOTS, unit="forwards"))
        by_row = {row: sorted(b[1:] for b in boxes if b[0] == row) for row in (0, 1)}
        assert by_row[0] == [(0, 1), (1, 2), (2, 4), (4, 6), (6, 7), (7, 9)]
        assert by_row[1] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 7), (7, 9)]

    def test_forward_backward_and_idle_have_looks_of_their_own(self):
        boxes = boxes_of(plots.pipeline_timetable(SLOTS, unit="forwards"))
        forward, backward, idle = (boxes[place] for place in ((0, 0, 1), (0, 4, 6), (0, 2, 4)))
        assert len({forward, backward, idle}) == 3
        assert boxes[1, 2, 4] == backward
        assert boxes[1, 0, 1] == idle

    def test_the_rows_read_like_the_streams(self):
        for streams in (GPIPE, ONE_F_ONE_B, streams_of("1f1b", 4, 3)):
            count = len(streams)
            words = words_of(
                plots.pipeline_timetable(predicted_slots(streams, [1] * count, [2] * count))
            )
            assert words == {row: list(map(str, stream)) for row, stream in enumerate(streams)}

    def test_narrow_boxes_keep_their_numbers_only(self):
        slots = predicted_slots(streams_of("gpipe", 2, 16), [1, 1], [2, 2])
        words = words_of(plots.pipeline_timetable(slots))
        assert words[0][:3] == ["0", "1", "2"]
        assert words[0][-3:] == ["B13", "B14", "B15"]
        slots = predicted_slots(streams_of("gpipe", 2, 100), [1, 1], [2, 2])
        assert not words_of(plots.pipeline_timetable(slots))

    def test_it_says_model_and_its_unit(self):
        figure = plots.pipeline_timetable(SLOTS, title="1F1B", unit="forwards of a micro-batch")
        assert legend_of(figure) == ["forward (model)", "backward (model)", "idle (model)"]
        axes = figure.figure.axes[0]
        assert axes.get_title("left") == "1F1B (model)"
        assert axes.get_xlabel() == "time (forwards of a micro-batch)"
        hatches = {c.get_hatch() for c in axes.collections} - {None}
        assert hatches == {STYLES["forward"].model.hatch}
        seconds = plots.pipeline_timetable(predicted_slots(GPIPE, [0.01] * 2, [0.02] * 2))
        assert seconds.figure.axes[0].get_xlabel() == "time (ms)"
        assert "the step takes 90 ms" in seconds.caption

    def test_words_hold_the_bubble_the_formula_and_what_is_held(self):
        figure = plots.pipeline_timetable(SLOTS, unit="forwards")
        assert "stage 0 F0 F1 B0 B1; stage 1 F0 B0 F1 B1" in figure.alt
        assert "9 forwards, and stages are idle for 33%" in figure.alt
        assert "(P - 1) / (M + P - 1) = 33%" in figure.caption
        assert "at most 2, 1 micro-batches are held" in figure.caption

    def test_a_single_busy_stage_is_never_idle(self):
        figure = plots.pipeline_timetable(predicted_slots(streams_of("gpipe", 1, 2), [1], [2]))
        assert legend_of(figure) == ["forward (model)", "backward (model)"]
        assert "idle for 0%" in figure.alt

    def test_frozen_stages_without_backward_are_drawn(self):
        streams = [[a for a in GPIPE[0] if a.kind == "forward"], GPIPE[1]]
        slots = predicted_slots(streams, [1, 1], [2, 2])
        assert words_of(plots.pipeline_timetable(slots))[0] == ["F0", "F1"]

    def test_no_slots_are_refused(self):
        with pytest.raises(ValueError, match="no slots to draw"):
            plots.pipeline_timetable([])


class TestTimeline:
    def test_the_kth_forward_is_the_kth_of_its_stream(self):
        for streams in (GPIPE, ONE_F_ONE_B):
            figure = plots.pipeline_timeline(ran(streams), streams)
            assert words_of(figure) == {row: list(map(str, s)) for row, s in enumerate(streams)}

    def test_it_shows_one_step_from_its_own_start(self):
        figure = plots.pipeline_timeline(ran(ONE_F_ONE_B), ONE_F_ONE_B)
        boxes = boxes_of(figure)
        left, right = min(b[1] for b in boxes), max(b[2] for b in boxes)
        # Two hops of 1 ms each way on the longest path.
        assert (left, right) == (pytest.approx(0), pytest.approx(92))
        assert figure.figure.axes[0].get_xlim() == pytest.approx((0, 92))

    def test_a_stage_that_is_done_waits_for_the_end(self):
        boxes = boxes_of(plots.pipeline_timeline(ran(ONE_F_ONE_B), ONE_F_ONE_B))
        last = {row: max(b[2] for b in boxes if b[0] == row) for row in (0, 1)}
        assert last == {0: pytest.approx(92), 1: pytest.approx(92)}

    def test_a_stage_has_its_device_and_its_peak_memory(self):
        trace = replace(ran(GPIPE), devices={0: "cuda:0", 1: "cuda:0"})
        result = SimpleNamespace(trace=trace, peak_memory=[PeakMemory(2**20), PeakMemory(2**10)])
        figure = plots.pipeline_timeline(result, GPIPE)
        axes = figure.figure.axes[0]
        lanes = [label.get_text() for label in axes.get_yticklabels()]
        assert lanes == ["0 · cuda:0\n1 MiB", "1 · cuda:0\n1 KiB"]
        assert axes.get_ylabel() == "stage · device,\npeak memory"
        assert "Peak memory: stage 0 1 MiB, stage 1 1 KiB." in figure.caption
        assert "ranks 0 and 1 share cuda:0" in figure.alt

    def test_filled_looks_and_no_model(self):
        figure = plots.pipeline_timeline(ran(ONE_F_ONE_B), ONE_F_ONE_B)
        assert legend_of(figure) == ["forward", "backward", "communicate", "wait"]
        hatches = {c.get_hatch() for c in figure.figure.axes[0].collections} - {None}
        assert STYLES["forward"].model.hatch not in hatches
        assert figure.caption.startswith("Measured: the step takes 92 ms")

    def test_the_measured_bubble_is_that_of_the_slots(self):
        expected = predicted_slots(ONE_F_ONE_B, [0.01] * 2, [0.02] * 2, [0.001])
        found = plots.measured_slots(ran(ONE_F_ONE_B), ONE_F_ONE_B)
        assert [slot[:3] for slot in found] == [slot[:3] for slot in expected]
        assert bubble(found) == pytest.approx(bubble(expected))

    def test_every_step_can_be_shown(self):
        trace = ran(GPIPE)
        starts = [plots.measured_slots(trace, GPIPE, step=k)[0].start_s for k in (0, 1, 2, -1)]
        assert starts == pytest.approx([5.0, 5.5, 6.0, 6.0])
        with pytest.raises(ValueError, match=r"no step 3: .* ran 3 steps"):
            plots.measured_slots(trace, GPIPE, step=3)

    def test_streams_of_another_run_are_refused(self):
        with pytest.raises(ValueError, match=r"rank 1 ran 12 .*stream's 4"):
            plots.measured_slots(ran(GPIPE), ONE_F_ONE_B)
        with pytest.raises(ValueError, match=r"rank 0 ran 12 .*stream's 8"):
            plots.measured_slots(ran(GPIPE), streams_of("gpipe", 2, 4))
        with pytest.raises(ValueError, match="a trace is needed"):
            plots.measured_slots([1], GPIPE)
