import itertools
from dataclasses import replace

import pytest
from splits import LINK, MIB, PROFILE, measured

from labkit.placement.planner import predict_split
from workbook import plots


def predicted(points=(3,), **options):
    return predict_split(PROFILE, points, LINK, **options)


def rows():
    found = []
    for batch_size in (16, 32):
        split = predicted((3, 4))
        run = replace(measured(split), batch_size=batch_size)
        found += plots.hop_rows("3 devices", run, split)
    return found


class TestCommunicationTime:
    def test_a_split_has_a_row_for_each_cut_and_direction(self):
        split = predicted((3, 4))
        first, second, *_ = found = plots.hop_rows("3 devices", measured(split, 2.0), split)
        assert len(found) == 4
        assert first == {
            "placement": "3 devices",
            "cut": 3,
            "direction": "activation",
            "batch_size": 16,
            "num_bytes": 4 * MIB,
            "seconds": [2 * split.hop_s[0]] * 5,
            "model_s": split.hop_s[0],
        }
        assert (second["cut"], second["direction"]) == (3, "gradient")
        assert "model_s" not in plots.hop_rows("3 devices", measured(split))[0]

    def test_what_does_not_cross_has_no_row(self):
        split = predicted((3, 4), frozen=4)
        found = plots.hop_rows("frozen", measured(split), split)
        crossed = [(row["cut"], row["direction"]) for row in found]
        assert crossed == [(3, "activation"), (4, "activation")]
        titles = [a.get_title("left") for a in plots.communication_time(found).figure.axes]
        assert titles == ["Activations, forward", "Bytes, either way"]

    def test_bars_are_medians_and_the_models_are_hatched(self):
        forward, backward, sizes = plots.communication_time(rows()).figure.axes
        split = predicted((3, 4))
        for axes in (forward, backward):
            bars = [(patch.get_width(), patch.get_hatch()) for patch in axes.patches]
            models = [width for width, hatch in bars if hatch == "////"]
            assert sorted(models) == sorted(2 * split.hop_s)
            assert len(bars) == 8
        widths = [patch.get_width() for patch in sizes.patches]
        assert widths == [4 * MIB, MIB] * 2

    def test_groups_are_named_from_the_top_and_nothing_overlaps(self):
        axes = plots.communication_time(rows()).figure.axes[0]
        groups = [label.get_text() for label in axes.get_yticklabels()]
        assert groups == ["3 devices\ncut 3", "3 devices\ncut 4"]
        low, high = axes.get_ylim()
        assert low > high
        edges = sorted((p.get_y(), p.get_y() + p.get_height()) for p in axes.patches)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(edges))

    def test_whiskers_span_the_middle_half(self):
        row = rows()[0] | {"seconds": [1.0, 2.0, 3.0, 4.0, 50.0]}
        figure = plots.communication_time([row])
        (whisker,) = [c for c in figure.figure.axes[0].collections if hasattr(c, "get_segments")]
        assert whisker.get_segments()[0][:, 0].tolist() == [2.0, 4.0]
        assert "medians of 5 steps" in figure.caption

    def test_words(self):
        figure = plots.communication_time(rows())
        assert "cut 3, batch 16, activation, 4 MiB in 10.4 ms, model 5.19 ms" in figure.alt
        assert "2 times the model" in figure.caption
        assert len(plots.communication_time(rows() * 3).alt) < 300

    def test_wrong_rows_are_refused(self):
        with pytest.raises(ValueError, match="one cut or more"):
            plots.communication_time([])
        with pytest.raises(ValueError, match=r"hop of 0 s.*above 0 only"):
            plots.communication_time([rows()[0] | {"seconds": [0.0]}])
        with pytest.raises(ValueError, match="unknown direction 'sideways'"):
            plots.communication_time([rows()[0] | {"direction": "sideways"}])
