"""An all-reduce over hosts, drawn: an arrow for each message, and the bytes over a card."""

import pytest
from parts import legend_of

from labkit.costs import card_bytes
from labkit.schedules.hierarchical import hierarchical_all_reduce, rounds
from workbook import plots

TWO = ((0, 1), (2, 3))


def panels(figure):
    return [axes for axes in figure.figure.axes if axes.get_title(loc="left")]


def arrows(axes):
    """(from, to, width) of each arrow."""
    found = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
    return [(tuple(a.xyann), tuple(a.xy), a.arrow_patch.get_linewidth()) for a in found]


def test_two_hosts_of_two_ranks_in_three_panels():
    figure = plots.hosts_rounds(TWO, title="Over two hosts")
    titles = [axes.get_title(loc="left") for axes in panels(figure)]
    assert titles == [
        "round 1\ncard: nothing",
        "rounds 2 to 3\ncard: S/2 each",
        "round 4\ncard: nothing",
    ]
    inside, between, _ = (arrows(axes) for axes in panels(figure))
    # A host is a column.
    assert all(start[0] == end[0] for start, end, _ in inside)
    assert all(start[1] == end[1] and start[0] != end[0] for start, end, _ in between)
    assert min(width for *_, width in between) > max(width for *_, width in inside)
    assert len(inside) == len(between) == 4
    assert legend_of(figure) == ["inside a host", "between hosts"]
    assert "4 rounds, in 2 of them messages between hosts. In all, S leaves" in figure.caption
    assert "Round 1, over a card nothing; rounds 2 to 3, over a card S/2 each" in figure.alt


def test_all_rounds_of_the_flat_ring_look_alike():
    (panel,) = panels(figure := plots.hosts_rounds(TWO, "ring"))
    assert panel.get_title(loc="left") == "rounds 1 to 6\ncard: S/4 each"
    assert len(arrows(panel)) == 4
    assert "In all, 3 S/2 leaves a host" in figure.caption


@pytest.mark.parametrize("hosts", [((0,), (1, 2)), ((0, 1), (2, 3), (4, 5)), ((0, 2), (1, 3))])
@pytest.mark.parametrize(
    ("algorithm", "parts"), [("ring", {1: "S", 2: "2 S"}), ("hierarchical", {})]
)
def test_what_leaves_a_host_is_what_costs_say(hosts, algorithm, parts):
    caption = plots.hosts_rounds(hosts, algorithm).caption
    said = caption.partition("In all, ")[2].partition(" leaves")[0]
    top, _, bottom = said.replace(" S", "").replace("S", "1").partition("/")
    most = max(card_bytes(algorithm, 1200, 1, hosts))
    assert float(top) / float(bottom or 1) * 1200 == most


def test_hosts_of_different_sizes_have_a_column_each():
    hosts = ((0, 1, 2), (3,))
    drawn = panels(plots.hosts_rounds(hosts))
    every = rounds(hierarchical_all_reduce, hosts)
    assert len(every) == 10
    assert [len(arrows(axes)) for axes in drawn] == [3, 2, 2, 2, 3]
    numbers = [text.get_text() for text in drawn[0].texts if text.get_text()]
    assert numbers == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("hosts", "algorithm", "words"),
    [
        (TWO, "tree", "unknown algorithm 'tree'"),
        (((0,),), "ring", "0 kinds of rounds"),
        ((tuple(range(30)), (30,)), "hierarchical", "32 kinds of rounds"),
    ],
)
def test_what_cannot_be_drawn(hosts, algorithm, words):
    with pytest.raises(ValueError, match=words):
        plots.hosts_rounds(hosts, algorithm)
