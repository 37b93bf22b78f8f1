from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from parts import SPANS, TRACE, boxes_of, lanes_of, legend_of, spans_of

from labkit import RunResult
from labkit.engine.comm.peak_memory import PeakMemory
from labkit.engine.tracing import Span, Trace
from labkit.engine.tracing.limits import what_limited
from workbook import plots


def of_ranks(*spans):
    return Trace.merge([spans])


class TestTimeline:
    def test_bars_are_the_spans_with_rank_0_on_top_in_the_color_of_their_kind(self):
        figure = plots.timeline(TRACE)
        bars = boxes_of(figure)
        expected = [(1e3 * span.start_s, 1e3 * span.end_s, span.rank) for span in TRACE.spans]
        lanes = bars[:, 2:].mean(axis=1)
        np.testing.assert_allclose(np.column_stack([bars[:, :2], lanes]), expected, atol=1e-9)
        bottom, top = figure.figure.axes[0].get_ylim()
        assert top < bottom
        colors = [to_hex(color).upper() for color in spans_of(figure).get_facecolors()]
        assert colors == [plots.STYLES[span.kind].color for span in TRACE.spans]
        assert legend_of(figure) == ["compute", "communicate", "wait"]

    def test_kinds_that_are_hardly_seen_share_one_entry(self):
        kinds = {"update": 2, "compute": 60, "data": 2, "wait": 39}
        spans = [Span(0, kind, 0.0, seconds) for kind, seconds in kinds.items()]
        figure = plots.timeline(of_ranks(*spans))
        assert legend_of(figure) == ["compute", "wait", "other: update, data"]
        # Where they take less than a 33rd of every rank's time, they have none.
        figure = plots.timeline(of_ranks(*spans, Span(1, "compute", 0.0, 300)))
        assert legend_of(figure) == ["compute", "wait"]

    def test_a_server_s_many_short_updates_have_an_entry(self):
        updates = [Span(0, "update", second, second + 0.2) for second in range(40)]
        workers = [Span(rank, "compute", 0.0, 40.0) for rank in range(1, 5)]
        figure = plots.timeline(of_ranks(*updates, *workers))
        assert legend_of(figure) == ["compute", "update"]

    def test_of_more_than_four_kinds_two_that_belong_together_share_an_entry(self):
        kinds = ("forward", "backward", "update", "share_reduce", "share_only", "wait")
        entries = legend_of(plots.timeline(of_ranks(*(Span(0, kind, 0, 1) for kind in kinds))))
        assert entries == ["forward, backward", "update", "share_reduce, share_only", "wait"]

    def test_the_caption_is_what_explain_says_of_the_time_that_is_drawn(self):
        spans = [replace(s, start_s=s.start_s + 0.005, end_s=s.end_s + 0.005) for s in SPANS]
        trace = of_ranks(*spans)
        result = RunResult([None] * 2, trace, 0.01, [0, 0], [0, 0])
        figure = plots.timeline(result)
        assert figure.caption == str(result.explain()) != str(what_limited(trace))
        assert figure.figure.axes[0].get_xlim()[0] == pytest.approx(0, abs=0.1)
        assert plots.timeline(trace).caption == str(what_limited(trace))
        window = what_limited(trace.between(0.006, 0.009), 0.006)
        part = plots.timeline(result, start_s=0.006, end_s=0.009)
        assert part.caption == f"In the part shown: {window}"

    def test_window_clips_seconds_and_axis_but_no_bar(self):
        figure = plots.timeline(TRACE, start_s=0.003, end_s=0.005)
        assert figure.alt.endswith("rank 1: communicate 1 ms, wait 1 ms.")
        assert boxes_of(figure)[:2, :2].tolist() == [[0.0, 4.0], [1.0, 4.0]]
        assert figure.figure.axes[0].get_xlim() == pytest.approx((3, 5), abs=0.02)

    def test_a_lane_names_its_rank_s_device_and_peak_memory(self):
        on_gpus = replace(TRACE, devices={0: "cuda:0", 1: "cuda:1"})
        gpu = PeakMemory(1, {"cuda:0": 2**20, "cuda:1": 5})
        result = SimpleNamespace(trace=on_gpus, peak_memory=[gpu, PeakMemory(2**30)])
        figure = plots.timeline(result)
        assert lanes_of(figure) == ["0 · cuda:0\n1 MiB + 5 B", "1 · cuda:1\n1 GiB"]
        assert figure.figure.axes[0].get_ylabel() == "rank · device,\npeak memory"
        assert "rank 0 · cuda:0, 1 MiB + 5 B: compute 4 ms" in figure.alt

    def test_another_thread_is_a_thin_lane_under_its_rank(self):
        main, other = Span(0, "compute", 0, 3), Span(0, "all_reduce", 1, 4, lane=1)
        figure = plots.timeline(of_ranks(main, other, Span(1, "compute", 0, 4)))
        main, beside, other = boxes_of(figure)
        # Nothing of a rank is drawn over anything else, and the other thread's bar is thinner.
        assert main[3] < other[2] < other[3] < beside[2]
        assert other[3] - other[2] < (main[3] - main[2]) / 2
        assert figure.alt.endswith("other threads, of all ranks together: all_reduce 3 s.")

    def test_where_nothing_is_to_be_seen_it_says_what_spans_are(self):
        for trace, start_s in ((Trace(), None), (TRACE, 3.0)):
            with pytest.raises(ValueError, match=r"no span .* `with comm\.span\(\"compute\"\)"):
                plots.timeline(trace, start_s=start_s)
