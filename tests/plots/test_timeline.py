from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from parts import SPANS, TRACE, legend_of

from labkit.comm.peak_memory import DeviceMemory, PeakMemory
from labkit.tracing import Span, Trace
from workbook import plots
from workbook.plots.timeline import timeline_words


def bars_of(figure):
    """[left, right, top, bottom] of each span's bar."""
    (collection,) = [c for c in figure.figure.axes[0].collections if c.get_gid() == "spans"]
    boxes = [path.get_extents() for path in collection.get_paths()]
    return np.array([(box.x0, box.x1, box.y0, box.y1) for box in boxes])


def lanes_of(figure):
    return [label.get_text() for label in figure.figure.axes[0].get_yticklabels()]


class TestTimeline:
    def test_bars_are_the_spans_with_rank_0_on_top(self):
        bars = bars_of(plots.timeline(TRACE))
        expected = [(1e3 * span.start_s, 1e3 * span.end_s, span.rank) for span in TRACE.spans]
        lanes = bars[:, 2:].mean(axis=1)
        np.testing.assert_allclose(np.column_stack([bars[:, :2], lanes]), expected, atol=1e-9)
        bottom, top = plots.timeline(TRACE).figure.axes[0].get_ylim()
        assert top < bottom

    def test_bars_have_the_color_of_their_kind(self):
        (bars,) = [
            c for c in plots.timeline(TRACE).figure.axes[0].collections if c.get_gid() == "spans"
        ]
        colors = [to_hex(color).upper() for color in bars.get_facecolors()]
        assert colors == [plots.STYLES[span.kind].color for span in TRACE.spans]

    def test_legend_holds_the_kinds_present_only(self):
        assert legend_of(plots.timeline(TRACE)) == ["compute", "communicate", "wait"]

    @pytest.mark.parametrize(("factor", "unit"), [(1e-3, "µs"), (1, "ms"), (1000, "s")])
    def test_unit_fits_the_range(self, factor, unit):
        spans = [Span(s.rank, s.kind, factor * s.start_s, factor * s.end_s) for s in SPANS]
        axes = plots.timeline(Trace.merge([spans])).figure.axes[0]
        assert axes.get_xlabel() == f"time since the start ({unit})"
        assert axes.get_xlim()[1] == pytest.approx(5, rel=0.01)

    def test_alt_and_caption_say_the_shares(self):
        figure = plots.timeline(TRACE)
        assert "2 ranks over 5 ms" in figure.alt
        assert "rank 1: compute 20%, communicate 20%, wait 60%" in figure.alt
        assert "80% of 5 ms on rank 1 and 20% on rank 0" in figure.caption
        assert "Mean over the ranks: compute 50%" in figure.caption
        assert "Blank" not in figure.caption

    def test_time_outside_spans_is_named(self):
        spans = [Span(0, "compute", 0, 1), Span(1, "compute", 0.5, 1)]
        caption = plots.timeline(Trace.merge([spans])).caption
        assert "None of the 1 s" in caption
        assert "Blank, 25%" in caption

    def test_window_clips_shares_and_axis_but_no_bar(self):
        figure = plots.timeline(TRACE, start_s=0.003, end_s=0.005, ranks=[1])
        assert "rank 1: communicate 50%, wait 50%" in figure.alt
        assert bars_of(figure)[:, :2].tolist() == [[1.0, 4.0], [4.0, 5.0]]
        assert figure.figure.axes[0].get_xlim() == pytest.approx((3, 5), abs=0.02)

    def test_accepts_a_result_with_a_trace_and_spans_in_any_order(self):
        result = SimpleNamespace(trace=Trace(tuple(reversed(TRACE.spans))))
        assert plots.timeline(result).alt == plots.timeline(TRACE).alt

    def test_a_lane_names_its_rank_s_device_and_peak_memory(self):
        on_gpus = replace(TRACE, devices={0: "cuda:0", 1: "cuda:1"})
        gpu = PeakMemory(1, {"cuda:0": DeviceMemory(2**20, 2**21), "cuda:1": DeviceMemory(5, 8)})
        result = SimpleNamespace(trace=on_gpus, peak_memory=[gpu, PeakMemory(2**30)])
        figure = plots.timeline(result)
        assert lanes_of(figure) == ["0 · cuda:0\n1 MiB + 5 B", "1 · cuda:1\n1 GiB"]
        assert figure.figure.axes[0].get_ylabel() == "rank · device,\npeak memory"
        for words in (figure.alt, figure.caption):
            assert "Devices: rank 0 on cuda:0; rank 1 on cuda:1." in words
            assert "rank 0 1 MiB on cuda:0 and 5 B on cuda:1, rank 1 1 GiB." in words
        assert "rank 0" not in plots.timeline(result, ranks=[1]).caption.partition("Peak")[2]

    def test_ranks_that_share_a_gpu_are_named_together(self):
        shared = replace(TRACE, devices={0: "cuda:0", 1: "cuda:0"})
        figure = plots.timeline(shared)
        assert lanes_of(figure) == ["0 · cuda:0", "1 · cuda:0"]
        assert "Devices: ranks 0 and 1 share cuda:0." in figure.caption
        assert all("ranks 0 and 1 share cuda:0" in words for words in timeline_words(shared))

    def test_ranks_on_the_cpu_say_so_in_their_lanes_alone(self):
        figure = plots.timeline(replace(TRACE, devices={0: "cpu", 1: "cpu"}))
        assert lanes_of(figure) == ["0 · cpu", "1 · cpu"]
        assert "Devices" not in figure.alt + figure.caption

    @pytest.mark.parametrize("peaks", [[], [None, None], [PeakMemory(None)] * 2])
    def test_what_is_not_known_is_not_said(self, peaks):
        figure = plots.timeline(SimpleNamespace(trace=TRACE, peak_memory=peaks))
        assert lanes_of(figure) == ["0", "1"]
        assert figure.figure.axes[0].get_ylabel() == "rank"
        assert "memory" not in figure.alt + figure.caption

    def test_of_many_ranks_the_most_and_the_least_memory_are_said(self):
        ranks = range(20)
        devices = {rank: f"cuda:{rank % 2}" for rank in ranks}
        trace = Trace.merge([[Span(rank, "compute", 0, 1) for rank in ranks]], devices)
        result = SimpleNamespace(trace=trace, peak_memory=[PeakMemory(2**10 + r) for r in ranks])
        figure = plots.timeline(result)
        assert "at most rank 19 1.02 KiB, at least rank 0 1 KiB" in figure.caption
        assert "Devices: 10 ranks share cuda:0; 10 ranks share cuda:1." in figure.caption
        # Lanes this low have no room for a second line.
        assert lanes_of(figure)[:2] == ["0 · cuda:0", "1 · cuda:1"]

    def test_a_prediction_says_model(self):
        figure = plots.timeline(TRACE, model=True)
        assert legend_of(figure)[0] == "compute (model)"
        assert figure.alt.startswith("Predicted")
        hatches = {c.get_hatch() for c in figure.figure.axes[0].collections} - {None}
        assert hatches == {plots.STYLES["compute"].model.hatch}

    def test_many_ranks_stay_in_bounds(self):
        trace = Trace.merge([[Span(rank, "compute", 0, 1) for rank in range(100)]])
        figure = plots.timeline(trace)
        assert figure.figure.get_figheight() < 10
        assert len(figure.figure.axes[0].get_yticks()) <= 34
        assert len(figure.alt) < 200

    def test_20_000_spans_are_drawn_without_a_hatch_each(self):
        spans = [
            Span(rank, ("compute", "communicate", "wait")[i % 3], i * 1e-4, (i + 1) * 1e-4)
            for rank in range(4)
            for i in range(5000)
        ]
        figure = plots.timeline(Trace.merge([spans]))
        assert len(bars_of(figure)) == 20_000
        assert len(figure.figure.axes[0].collections) == 1
        assert "20,000 spans are narrower than a pixel" in figure.caption
        assert figure.png()

    def test_another_thread_is_a_thin_lane_under_its_rank(self):
        spans = [
            Span(0, "compute", 0, 3),
            Span(0, "all_reduce", 1, 4, lane=1),
            Span(0, "wait", 3, 4),
            Span(1, "compute", 0, 4),
        ]
        figure = plots.timeline(Trace.merge([spans]))
        main, other, waiting, beside = bars_of(figure)[[0, 2, 3, 1]]
        # Nothing of a rank is drawn over anything else, and the other thread's bar is thinner.
        assert main[3] == waiting[3] < other[2] < other[3] < beside[2]
        assert other[3] - other[2] < (main[3] - main[2]) / 2
        assert "rank 0: compute 75%, wait 25%; rank 1: compute 100%" in figure.alt
        assert "beside the main one, rank 0: all_reduce 75%" in figure.alt
        assert "thin lane" in figure.caption

    def test_an_empty_trace_names_the_next_step(self):
        with pytest.raises(ValueError, match=r"no spans.*comm\.span\(\"compute\"\)"):
            plots.timeline(Trace())

    def test_wrong_inputs_are_refused_with_the_numbers(self):
        with pytest.raises(ValueError, match=r"ranks \[7\].*has ranks \[0, 1\]"):
            plots.timeline(TRACE, ranks=[7])
        with pytest.raises(ValueError, match=r"start_s=3 .*runs from 0 to 0\.005 s"):
            plots.timeline(TRACE, start_s=3)
        with pytest.raises(ValueError, match="no span lies between"):
            plots.timeline(TRACE, start_s=0.004, end_s=0.001)
        with pytest.raises(ValueError, match=r"got list.*labkit\.run"):
            plots.timeline([1, 2])
