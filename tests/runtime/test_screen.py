"""What is left of output that overwrites itself: the last state of each line."""

import io
import random

import pytest
import tqdm.std

from labkit.runtime.screen import Screen, marker


def shown(*pieces):
    """The lines of a rank that has written these pieces."""
    screen = Screen()
    found = [item for piece in pieces for item in screen.feed(piece.encode())]
    return [i if isinstance(i, int) else i.decode() for i in [*found, *screen.end()]]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("1\r2\r3\r", ["3"]),
        ("1\r2\r3\n4\r5", ["3", "5"]),
        ("\r 10%\r 90%\n", [" 90%"]),
        ("loading\r       \r", []),
        ("loading\r\x1b[Kdone\n", ["done"]),
        ("a\x1b[2K\rb\n", ["b"]),
        ("\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        ("ends\x1b", ["ends\x1b"]),
        ("ends\x1b]labkit;1", ["ends\x1b]labkit;1"]),
    ],
)
def test_the_last_state_of_each_line_is_left(text, lines):
    assert shown(text) == lines
    assert shown(*text) == lines, "however the pipe cuts it"


def test_a_thousand_steps_are_one_line():
    assert shown(*(f"step {step}\r" for step in range(1000))) == ["step 999"]


@pytest.mark.parametrize("leave", [True, False])
def test_nested_bars_of_tqdm_leave_their_last_states(leave):
    stream = io.StringIO()
    settings = {"file": stream, "mininterval": 0, "ncols": 40}
    for _ in tqdm.std.tqdm(range(3), desc="outer", **settings):
        for _ in tqdm.std.tqdm(range(4), desc="inner", leave=leave, position=1, **settings):
            pass
    print("after", file=stream)
    lines = shown(*stream.getvalue())
    outer = [line for line in lines if "outer" in line]
    assert len(outer) == 1, lines
    assert "3/3" in outer[0]
    assert lines[-1] == "after"
    # As in a terminal, an inner bar that stays is left above the outer one.
    assert len(lines) == 2 + 3 * leave


def test_an_object_keeps_its_place_between_the_lines():
    text = f"a\nb{marker(1).decode()}c\n{marker(12).decode()}"
    assert shown(text) == ["a", "b", 1, "c", 12]
    assert shown(*text) == ["a", "b", 1, "c", 12]


def test_a_line_is_settled_when_the_cursor_has_left_it_for_a_while():
    screen = Screen()
    assert screen.feed(b"\r 50%\r100%\nafter\n") == []
    assert screen.bars == ["100%"]
    assert screen.rest() == [], "it was there just before"
    assert screen.rest() == [b"100%", b"after"]
    assert screen.feed(b"now at once\n") == [b"now at once"]


def test_an_outer_bar_is_not_settled_while_an_inner_one_goes_on():
    screen = Screen()
    screen.feed(b"\router")
    for step in range(9):
        assert screen.feed(b"\n\rinner %d" % step) == screen.rest() == []
        assert screen.feed(b"\x1b[A") == screen.rest() == []
    assert screen.bars == ["outer", "inner 8"]
    assert screen.feed(b"\router 100%") + screen.end() == [b"outer 100%", b"inner 8"]


def test_nothing_is_kept_for_ever_and_no_bytes_are_too_odd():
    screen = Screen()
    assert len(screen.feed(b"\rx" + b"line\n" * 5000)) > 4900
    assert sum(map(len, screen.feed(bytes(1_000_000)))) > 900_000
    noise = random.Random(0).randbytes(100_000) + b"\x1b[A" * 100 + b"\n\r" * 100
    screen.feed(noise)
    screen.end()
