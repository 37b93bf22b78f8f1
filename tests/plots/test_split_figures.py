"""What a split costs, drawn: bars are the model's numbers, and no word lies on another."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from parts import bars_of
from splits import LAYERS, LINK, PROFILE

from labkit.costs.planner import predict_split
from workbook import plots

# As many layers as make long names of stages.
DEEP = replace(PROFILE, layers=tuple(LAYERS * 18))
CROWDED = [(PROFILE, points) for points in ((), (3,), (4, 5), (1, 2, 3), (3, 4, 5))]
CROWDED += [(DEEP, points) for points in ((51, 77), (31, 57, 83), (105, 106, 107))]


def test_bars_are_the_times_and_bytes_and_the_cuts_stand_out():
    split = predict_split(PROFILE, (3, 4), LINK)
    figure, ms, mib = plots.split_costs(PROFILE, split), 1e3, 2**-20
    found = {kind: bars for axes in figure.figure.axes for kind, bars in bars_of(axes).items()}
    heights = {kind: [bar.get_height() for bar in bars] for kind, bars in found.items()}
    assert heights["forward"] == pytest.approx(np.multiply(split.forward_s, ms))
    assert heights["backward"] == pytest.approx(np.multiply(split.backward_s, ms))
    assert heights["step"] == pytest.approx([split.step_s * ms])
    assert heights["activation"] == pytest.approx(np.multiply(split.hop_s, ms))
    assert heights["gradient"] == pytest.approx(np.multiply(split.backward_hop_s, ms))
    assert heights["memory"] == pytest.approx(np.multiply(split.memory_bytes, mib))
    for low, high in zip(found["forward"], found["backward"]):
        assert (low.get_x(), low.get_height()) == (high.get_x(), high.get_y())
    every = figure.figure.axes[0].patches
    assert [bar.get_height() for bar in every] == [8, 8, 4, 1, 1]
    colors = [to_hex(bar.get_facecolor()) for bar in every]
    assert colors[2] == colors[3] != colors[0] == colors[1] == colors[4]


@pytest.mark.parametrize(("profile", "points"), CROWDED)
def test_no_word_lies_on_another_or_off_the_figure(profile, points):
    figure = plots.split_costs(profile, predict_split(profile, points, LINK)).figure
    figure.draw_without_rendering()
    outside = set()
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        low, high = axis.get_view_interval()
        places = zip(axis.get_majorticklocs(), axis.get_majorticklabels())
        outside |= {label for place, label in places if not low <= place <= high}
    texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    words = [(t.get_text(), t.get_window_extent()) for t in texts if t not in outside]
    for (one, box), (other, other_box) in itertools.combinations(words, 2):
        assert not box.overlaps(other_box), (one, other)
    for word, box in words:
        assert all(map(figure.bbox.containsx, (box.x0, box.x1))), word
        assert all(map(figure.bbox.containsy, (box.y0, box.y1))), word
