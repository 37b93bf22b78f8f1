"""What the caller sees of the ranks' output."""

import os
import sys
import time
from multiprocessing import Pipe

import pytest
from ranks import travel_by_value

from labkit import WorkerError, run
from labkit.runtime.output import Output

travel_by_value(__name__)


@pytest.fixture
def pipes():
    ends = [Pipe(duplex=False) for _ in range(3)]
    output = Output([receiver for receiver, _ in ends])

    def say(rank, text):
        os.write(ends[rank][1].fileno(), text.encode())
        output.read([ends[rank][0]])

    yield output, say
    output.close()
    for _, sender in ends:
        sender.close()


def test_rank_0_is_shown_at_once_and_others_wait_for_the_ranks_below(pipes, capsys):
    output, say = pipes
    say(1, "one\n")
    say(0, "zero\n")
    output.show(finished=set())
    assert capsys.readouterr().out == "[rank 0] zero\n"
    output.show(finished={0})
    assert capsys.readouterr().out == "[rank 1] one\n"


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False])
def test_lines_are_held_for_two_seconds_or_under_test_until_the_end(
    live, pipes, capsys, monkeypatch
):
    output, say = pipes
    monkeypatch.setenv("LABKIT_LIVE", "1" if live else "0")
    say(2, "two\n")
    output.show(finished=set())
    assert capsys.readouterr().out == ""
    time.sleep(2.1)
    output.show(finished=set())
    assert capsys.readouterr().out == "[rank 2] two\n" * live
    output.flush()
    assert capsys.readouterr().out == "[rank 2] two\n" * (not live)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("\r 10%\r 90%\n1\r2\r3\r", [" 90%", "3"]),
        ("loading\r       \r", []),
        ("loading\r\x1b[Kdone\n", ["done"]),
        ("\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
    ],
)
def test_the_last_state_of_each_line_is_left_however_the_pipe_cuts_it(text, lines, pipes, capsys):
    output, say = pipes
    say(0, text)
    for one in text:
        say(1, one)
    output.flush()
    shown = [f"[rank {rank}] {line}" for rank in (0, 1) for line in lines]
    assert capsys.readouterr().out.splitlines() == shown


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto"])
def test_a_bar_is_one_line_in_the_end(module, capsys, monkeypatch):
    monkeypatch.setenv("LABKIT_LIVE", "0")

    def counts(comm):
        import importlib

        for _ in importlib.import_module(module).tqdm(range(50), mininterval=0):
            pass

    run(counts, world_size=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13] for line in lines] == ["[rank 0] 100%", "[rank 1] 100%"]


@pytest.mark.slow
def test_output_arrives_while_the_run_goes_on(tmp_path):
    gate = tmp_path / "gate"

    def waits(comm, path):
        print("hello from", comm.rank)
        while not os.path.exists(path):
            time.sleep(0.02)

    seen = []

    class Gate:
        """A stdout that opens the gate once both ranks have been heard."""

        def write(self, text):
            seen.append(text)
            if all(f"hello from {rank}" in "".join(seen) for rank in (0, 1)):
                gate.touch()

        def flush(self):
            pass

    keep, sys.stdout = sys.stdout, Gate()
    try:
        run(waits, str(gate), world_size=2, timeout_s=30)
    finally:
        sys.stdout = keep
    assert gate.exists()


def test_what_was_printed_or_displayed_before_a_failure_is_shown(capsys):
    def fails(comm):
        print("before the end")
        display("text")  # noqa: F821 (as in a notebook)
        raise ValueError("now")

    with pytest.raises(WorkerError):
        run(fails, world_size=1)
    assert capsys.readouterr().out == "[rank 0] before the end\n[rank 0] text\n"
