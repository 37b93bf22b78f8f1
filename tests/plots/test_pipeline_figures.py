import pytest
from parts import boxes_of, legend_of

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
        spans.append(Span(1, "wait", begun, begun + 0.01, 0, 0))
        # Marks and updates are not a part of the pipeline.
        spans += [Span(rank, "data", begun, begun + 1e-7) for rank in (0, 1)]
        spans += [Span(rank, "update", begun + 0.3, begun + 0.31) for rank in (0, 1)]
    return Trace.merge([spans])


class TestTimetable:
    def test_boxes_are_the_slots(self):
        boxes = boxes_of(plots.pipeline_timetable(SLOTS, unit="forwards"))
        rows = [sorted(b[:2].tolist() for b in boxes if round(b[2:].mean()) == s) for s in (0, 1)]
        assert rows[0] == [[0, 1], [1, 2], [4, 6], [7, 9]]
        assert rows[1] == [[1, 2], [2, 4], [4, 5], [5, 7]]

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
        assert legend_of(figure) == ["forward (model)", "backward (model)"]
        axes = figure.figure.axes[0]
        assert (axes.get_title("left"), axes.get_xlabel()) == ("1F1B (model)", "time (forwards)")
        hatches = {c.get_hatch() for c in axes.collections} - {None}
        assert hatches == {STYLES["forward"].model.hatch}
        assert "9 forwards, and stages are idle for 33%" in figure.alt
        assert "at most 2, 1 micro-batches are held" in figure.caption


class TestTimeline:
    @pytest.mark.parametrize("streams", [GPIPE, ONE_F_ONE_B])
    def test_it_shows_one_step_in_which_the_kth_forward_is_the_kth_of_its_stream(self, streams):
        figure = plots.pipeline_timeline(ran(streams), streams)
        assert words_of(figure) == {row: list(map(str, s)) for row, s in enumerate(streams)}
        # Two hops of 1 ms on the longest path.
        boxes = boxes_of(figure)
        assert (boxes[:, 0].min(), boxes[:, 1].max()) == (pytest.approx(0), pytest.approx(92))
        assert legend_of(figure) == ["forward", "backward", "wait"]
        assert figure.caption.startswith("Measured: the step takes 92 ms")

    def test_every_step_can_be_shown_and_other_streams_are_refused(self):
        trace = ran(GPIPE)
        starts = [plots.measured_slots(trace, GPIPE, step=k)[0].start_s for k in (0, 1, 2, -1)]
        assert starts == pytest.approx([5.0, 5.5, 6.0, 6.0])
        slots = predicted_slots(GPIPE, [0.01] * 2, [0.02] * 2, [0.001])
        assert bubble(plots.measured_slots(trace, GPIPE)) == pytest.approx(bubble(slots))
        with pytest.raises(IndexError):
            plots.measured_slots(trace, GPIPE, step=3)
        for others in (ONE_F_ONE_B, streams_of("gpipe", 2, 4)):
            with pytest.raises(ValueError, match=r"ran 12 .* not repeats"):
                plots.measured_slots(trace, others)
