"""What a cell shows when it fails: one screen, the learner's lines, no frames of libraries."""

import re
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from labkit.runtime.cell_errors import MOST_LINES, show_errors_on_one_screen

SETUP = """
import os, signal, threading, time
import torch
from torch import nn
import labkit
"""


class Notebook:
    """Cells that run in this process; ``fails`` returns what a cell shows for its error."""

    def __init__(self, shell):
        self.shell = shell
        self.shown = []
        shell._showtraceback = lambda etype, evalue, parts: self.shown.append("\n".join(parts))

    def run(self, source):
        assert self.shell.run_cell(source, store_history=True).success

    def fails(self, source):
        assert not self.shell.run_cell(source, store_history=True).success
        return self.shown.pop()


@pytest.fixture
def notebook(monkeypatch):
    for module in ("__main__", "builtins"):
        monkeypatch.setitem(sys.modules, module, sys.modules[module])
    quiet = Config()
    quiet.HistoryManager.enabled = False
    quiet.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=quiet)
    show_errors_on_one_screen()
    opened = Notebook(shell)
    opened.run(SETUP)
    yield opened
    InteractiveShell.clear_instance()


def check_screen(text):
    """Not too long, and all of its frames are of cells."""
    assert len(text.splitlines()) <= MOST_LINES, text
    assert "labkit/" not in text
    assert "site-packages" not in text
    assert not re.search(r"\.py\b", text), text


RAISES_IN_TORCH = """
def layer_of(comm):
    return nn.Linear(4, 2)

def wrong_shape(comm):
    if comm.rank == 1:
        layer_of(comm)(torch.ones(3))
    comm.recv(torch.empty(1), 1)
"""


def test_a_rank_that_raises_shows_its_line_first_then_the_cells_line(notebook):
    notebook.run(RAISES_IN_TORCH)
    text = notebook.fails("labkit.run(wrong_shape, world_size=2)")
    check_screen(text)
    lines = text.splitlines()
    assert lines[1] == "rank 1, Cell In[2], line 6: layer_of(comm)(torch.ones(3))"
    assert "----> 1 labkit.run(wrong_shape, world_size=2)" in lines
    assert lines[-2].startswith("WorkerError: rank 1 raised RuntimeError: ")
    assert "(1x3 and 4x2)" in lines[-2]


def test_the_learners_own_helpers_stay_here_and_in_the_rank(notebook):
    notebook.run("def inner(comm):\n    return {}[comm.rank]\n\ndef outer(comm):\n    inner(comm)")
    notebook.run("def helper(ranks):\n    labkit.run(outer, world_size=ranks)")
    text = notebook.fails("helper(2)")
    check_screen(text)
    assert "----> 1 helper(2)" in text
    assert "----> 2     labkit.run(outer, world_size=ranks)" in text
    assert re.search(r"In rank \d:\n  Cell In\[2\], line 5, in outer\n    inner\(comm\)", text)
    assert "Cell In[2], line 2, in inner" in text


def test_a_cause_is_shown_without_frames_of_libraries(notebook):
    text = notebook.fails(
        "def chained(comm):\n"
        "    try:\n"
        "        nn.Linear(4, 2)(torch.ones(3))\n"
        "    except RuntimeError as error:\n"
        "        raise ValueError('the shapes') from error\n"
        "labkit.run(chained, world_size=1)"
    )
    check_screen(text)
    assert "(1x3 and 4x2)" in text
    assert text.count("the shapes") >= 2


@pytest.mark.parametrize(
    "call",
    [
        "labkit.run(print, world_size=0)",
        "labkit.load_dataset('digit')",
        "labkit.train_with('rings')",
        "labkit.collectives.ring_all_reduce(None, None)",
        "workbook.plots.timeline(labkit.Trace([]), no_such_option=1)",
        "labkit.build_model('small_cnn', num_classes=2, input_shape=(1, 2, 3, 4), seed=0)",
    ],
)
def test_a_wrong_call_shows_the_call_and_the_message_alone(notebook, call):
    text = notebook.fails(f"a = 1\n{call}")
    check_screen(text)
    assert f"----> 2 {call}" in text
    assert len(text.splitlines()) < 10


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("workbook.plots.timline", "timeline"),
        ("workbook.check.ring.al_reduce", "all_reduce"),
        ("labkit.run(lambda comm: 1, world_size=1).value", "values"),
        ("labkit.run(lambda comm: comm.brrier(), world_size=1)", "barrier"),
        ("labkit.train_wiht", "train_with"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_right_one(notebook, mistyped, meant):
    text = notebook.fails(mistyped)
    check_screen(text)
    assert text.count(f"(did you mean '{meant}'?)") == 1


def test_a_deadlock_and_a_deadline(notebook):
    both = "def both(comm):\n    comm.recv(torch.empty(1), 1 - comm.rank)\n"
    text = notebook.fails(f"{both}labkit.run(both, world_size=2)")
    check_screen(text)
    assert text.splitlines()[1].startswith("rank 0, Cell In[2], line 2: comm.recv(")
    assert "deadlock: rank 0 -> rank 1 -> rank 0" in text
    sleeps = "def sleeps(comm):\n    time.sleep(60)\n"
    text = notebook.fails(f"{sleeps}labkit.run(sleeps, world_size=2, timeout_s=0.5)")
    check_screen(text)
    assert text.count("line 2: time.sleep(60)") == 2


RANK_1_PRESSES_STOP = """
me = os.getpid()
def ring(comm):
    if comm.rank == 1:
        while list(comm.session.board.ranks["op"][[0, 2]]) != [b"recv", b"recv"]:
            time.sleep(0.01)
        os.kill(me, signal.SIGINT); time.sleep(60)
    comm.recv(torch.empty(2), 1)
"""


def test_the_stop_button_says_what_each_rank_was_doing(notebook):
    notebook.run(RANK_1_PRESSES_STOP)
    text = notebook.fails("labkit.run(ring, world_size=3)")
    check_screen(text)
    assert "----> 1 labkit.run(ring, world_size=3)" in text
    waits = "was in recv, waiting for rank 1 to send float32 [2], at Cell In[2], line 7: comm.recv"
    assert f"rank 0 {waits}" in text
    assert (
        "rank 1 was in its own code, at Cell In[2], line 6: os.kill(me, signal.SIGINT); time"
        in text
    )
    assert f"rank 2 {waits}" in text


def test_long_messages_and_long_chains_of_calls_are_cut(notebook):
    notebook.run(
        "def deep(depth):\n"
        "    if depth:\n"
        "        return deep(depth - 1)\n"
        "    return labkit.run(floods, world_size=1)\n"
        "def floods(comm):\n"
        "    raise ValueError('x' * 5000 + '\\n' + 'line\\n' * 500)"
    )
    text = notebook.fails("deep(20)")
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) < 600
    assert "lines are left out; %xmode" in text
    assert "----> 1 deep(20)" in text


def test_what_is_not_about_labkit_and_verbose_mode_are_ipythons(notebook):
    assert "torch/nn/modules" in notebook.fails("nn.Linear(4, 2)(torch.ones(3))")
    notebook.shell.run_line_magic("xmode", "Verbose")
    assert "labkit/runtime/launch.py" in notebook.fails("labkit.run(print, world_size=0)")
    notebook.shell.run_line_magic("xmode", "Context")
