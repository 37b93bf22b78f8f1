import pytest
from parts import boxes_of, legend_of

from labkit.costs.pipeline_timeline import predicted_slots
from labkit.engine.tracing import Span, Trace
from labkit.schedules.pipeline import PIPELINES, pipeline_streams
from workbook import plots


def streams_of(schedule, stages, micro_batches):
    return [list(PIPELINES[schedule].actions(s, stages, micro_batches)) for s in range(stages)]


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


def ran(streams):
    """A trace of a step: forwards take 10 ms, backwards 20, hops 1."""
    slots = predicted_slots(streams, [0.01] * len(streams), [0.02] * len(streams), [0.001])
    spans = [Span(s.rank, s.kind, 5 + s.start_s, 5 + s.end_s) for s in slots]
    # An update is not a part of the pipeline.
    spans += [Span(1, "wait", 5.0, 5.01, 0, 0), Span(0, "update", 5.3, 5.31)]
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
        narrow = predicted_slots(streams_of("gpipe", 2, 30), [1, 1], [2, 2])
        words = words_of(plots.pipeline_timetable(narrow))[0]
        assert words == [f"B{number}" for number in range(30)], "29 does not fit a forward"

    def test_a_narrow_box_has_its_label_from_bottom_to_top(self):
        streams = pipeline_streams("interleaved", 4, 8)
        slots = predicted_slots(streams, [0.5] * 8, [1] * 8)
        figure = plots.pipeline_timetable(slots)
        assert words_of(figure) == {row: list(map(str, s)) for row, s in enumerate(streams)}
        turned = {text.get_text() for text in figure.figure.axes[0].texts if text.get_rotation()}
        assert {text[0] for text in turned} == {"F"}


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

    def test_other_streams_are_refused(self):
        for others in (ONE_F_ONE_B, streams_of("gpipe", 2, 4)):
            with pytest.raises(ValueError, match=r"ran 4 .* give the streams of this run"):
                plots.pipeline_timeline(ran(GPIPE), others)


def test_halves_of_backwards_and_short_stages_have_names_of_their_own():
    for schedule, chunks in (("zero_bubble", 1), ("interleaved", 2)):
        streams = pipeline_streams(schedule, 2, 4)
        slots = predicted_slots(streams, [1 / chunks] * 2 * chunks, [2 / chunks] * 2 * chunks)
        figure = plots.pipeline_timetable(slots)
        assert words_of(figure) == {r: list(map(str, row)) for r, row in enumerate(streams)}
        assert "With GPipe or 1F1B, equal stages" in figure.caption
    assert figure.caption.endswith("at most 2.5, 1.5 micro-batches are held, by rank.")
