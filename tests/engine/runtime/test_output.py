"""What the caller sees of the ranks' output."""

import os
from multiprocessing import Pipe

import pytest

from labkit.engine.runtime.output import Output


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("\r 10%\r 90%\n1\r2\r3\r", [" 90%", "3"]),
        ("\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
    ],
)
def test_the_last_state_of_each_line_is_left_however_the_pipe_cuts_it(text, lines, capsys):
    output, senders = Output(), []
    for _ in range(2):
        receiver, sender = Pipe(duplex=False)
        output.follow(receiver)
        senders.append(sender)
    os.write(senders[0].fileno(), text.encode())
    output.read(output.connections[:1])
    for one in text:
        os.write(senders[1].fileno(), one.encode())
        output.read(output.connections[1:])
    output.flush()
    output.close()
    shown = [f"[rank {rank}] {line}" for rank in (0, 1) for line in lines]
    assert capsys.readouterr().out.splitlines() == shown
