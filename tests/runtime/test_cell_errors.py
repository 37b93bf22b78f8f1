"""What a cell shows when it fails: the learner's lines and the message, no frames of libraries."""

import re
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from labkit.runtime.cell_errors import show_errors_on_one_screen

SETUP = """
import os, signal, time
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


def test_a_rank_that_raises_shows_its_line_and_the_cells_line(notebook):
    notebook.run(
        "def wrong_shape(comm):\n"
        "    if comm.rank == 1:\n"
        "        nn.Linear(4, 2)(torch.ones(3))\n"
        "    comm.recv(torch.empty(1), 1)\n"
    )
    notebook.run("def helper(ranks):\n    labkit.run(wrong_shape, world_size=ranks)")
    text = notebook.fails("helper(2)")
    assert "----> 1 helper(2)" in text
    assert "----> 2     labkit.run(wrong_shape, world_size=ranks)" in text
    assert "WorkerError: rank 1 raised RuntimeError: " in text
    assert "  at Cell In[2], line 3: nn.Linear(4, 2)(torch.ones(3))" in text
    before, _, _ = text.partition("Traceback of rank 1:")
    assert "labkit/" not in before


@pytest.mark.parametrize(
    "call",
    [
        "labkit.run(print, world_size=0)",
        "labkit.load_dataset('digit')",
        "labkit.train_with('rings')",
        "labkit.collectives.ring_all_reduce(None, None)",
        "labkit.train_wiht",
    ],
)
def test_a_wrong_call_shows_the_call_and_the_message_alone(notebook, call):
    text = notebook.fails(f"a = 1\n{call}")
    assert f"----> 2 {call}" in text
    assert not re.search(r"\.py\b", text), text
    assert len(text.splitlines()) < 10


def test_a_deadlock_and_a_deadline(notebook):
    both = "def both(comm):\n    comm.recv(torch.empty(1), 1 - comm.rank)\n"
    text = notebook.fails(f"{both}labkit.run(both, world_size=2)")
    assert "deadlock: rank 0 -> rank 1 -> rank 0" in text
    assert text.count("at Cell In[2], line 2: comm.recv(") == 2
    sleeps = "def sleeps(comm):\n    time.sleep(60)\n"
    text = notebook.fails(f"{sleeps}labkit.run(sleeps, world_size=2, timeout_s=0.5)")
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
    assert "----> 1 labkit.run(ring, world_size=3)" in text
    waits = "was in recv, waiting for rank 1 to send float32 [2], at Cell In[2], line 7: comm.recv"
    assert f"rank 0 {waits}" in text
    own = "was in its own code, at Cell In[2], line 6: os.kill(me, signal.SIGINT); time"
    assert f"rank 1 {own}" in text
    assert f"rank 2 {waits}" in text


def test_what_is_not_about_labkit_and_verbose_mode_are_ipythons(notebook):
    assert "torch/nn/modules" in notebook.fails("nn.Linear(4, 2)(torch.ones(3))")
    notebook.shell.run_line_magic("xmode", "Verbose")
    assert "labkit/runtime/launch.py" in notebook.fails("labkit.run(print, world_size=0)")
    notebook.shell.run_line_magic("xmode", "Context")
