"""``display``, figures and bars in ranks, in a script and in a notebook's kernel."""

import json
import os

import pytest
from ranks import travel_by_value

from labkit import run
from labkit.runtime.displays import MOST_OBJECTS
from labkit.runtime.messages import Shown
from labkit.runtime.objects import Objects

travel_by_value(__name__)


def test_in_a_script_objects_are_printed_as_text_in_their_places(capsys):
    def shows(comm):
        from IPython.display import HTML, Markdown, display as shown

        print("before")
        display("text", {"rank": comm.rank})  # noqa: F821 (as in a notebook)
        shown(HTML("<b>bold</b>"), Markdown("*m*"))
        print("after")

    run(shows, world_size=2)
    objects = ["<IPython.core.display.HTML object>", "<IPython.core.display.Markdown object>"]
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] {line}"
        for rank in range(2)
        for line in ("before", "'text'", f"{{'rank': {rank}}}", *objects, "after")
    ]


class Kernel:
    """A kernel's shell: keeps what is published."""

    kernel = True

    def __init__(self):
        self.published = []
        self.display_pub = self

    def publish(self, data, metadata, transient, update):
        self.published.append((data, transient.get("display_id"), update))

    def get_parent(self):
        return {}


@pytest.fixture
def kernel(monkeypatch):
    import IPython

    shell = Kernel()
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setenv("LABKIT_LIVE", "0")
    return shell


def test_figures_come_out_by_rank_shown_or_left_open(kernel, capsys):
    def draws(comm):
        import matplotlib.pyplot as plt

        plt.figure()
        plt.show()
        print("between")
        plt.plot([1, 2])

    run(draws, world_size=2)
    assert [data["image/png"][:4] for data, *_ in kernel.published] == [b"\x89PNG"] * 4
    said = ["displays:", "between", "displays:"]
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] {text}" for rank in range(2) for text in said
    ]


def test_in_a_script_a_figure_that_is_left_open_is_not_shown(capsys):
    def draws(comm):
        import matplotlib.pyplot as plt

        plt.figure(figsize=(2, 1))
        plt.show()
        plt.plot([1, 2])

    run(draws, world_size=1)
    assert capsys.readouterr().out == "[rank 0] <Figure size 200x100 with 0 Axes>\n"


def test_an_object_with_an_id_is_changed_in_its_place(kernel):
    def changes(comm):
        handle = display("waiting", display_id=True)  # noqa: F821
        print("between")
        handle.update("done")

    run(changes, world_size=1)
    assert [data["text/plain"] for data, *_ in kernel.published] == ["'done'"]


def test_one_that_is_already_shown_is_changed_in_the_cell(kernel):
    objects = Objects()
    objects.add(Shown(0, 1, {"text/plain": "waiting"}, {}, "it"))
    assert objects.text(0, 1) is None
    objects.show(0, 1)
    objects.add(Shown(0, 2, {"text/plain": "done"}, {}, "it", is_update=True))
    (first, name, is_update), (second, same, was_update) = kernel.published
    assert (first["text/plain"], is_update) == ("waiting", False)
    assert (second["text/plain"], was_update) == ("done", True)
    assert name == same


def test_an_object_comes_out_though_stdout_is_closed(capsys):
    def closes(comm):
        os.close(1)
        display("still here")  # noqa: F821

    run(closes, world_size=1)
    assert "[rank 0] 'still here'" in capsys.readouterr().out


def test_too_many_and_too_large_objects_are_left_out_with_a_sentence(capsys):
    def floods(comm):
        display({"text/plain": "x" * 21 * 2**20}, raw=True)  # noqa: F821
        for _ in range(MOST_OBJECTS + 50):
            display(1)  # noqa: F821

    run(floods, world_size=1)
    said = capsys.readouterr().out
    assert "an object of 21 MiB is left out: a rank may show 20 MiB in a run" in said
    assert said.count("[rank 0] 1\n") == MOST_OBJECTS - 1
    assert said.count(f"further objects are left out: a rank may show {MOST_OBJECTS}") == 1


def test_what_json_cannot_hold_travels_as_its_text(kernel):
    def odd(comm):
        class Odd:
            def _repr_mimebundle_(self, include=None, exclude=None):
                return {"application/json": {"it": object}, "text/plain": "odd"}

        display(Odd())  # noqa: F821

    run(odd, world_size=1)
    ((data, *_),) = kernel.published
    assert json.dumps(data["application/json"])


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_a_bar_is_one_line_in_the_end(module, capsys, monkeypatch):
    monkeypatch.setenv("LABKIT_LIVE", "0")

    def counts(comm):
        import importlib

        for _ in importlib.import_module(module).tqdm(range(50), mininterval=0):
            pass

    run(counts, world_size=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13] for line in lines] == ["[rank 0] 100%", "[rank 1] 100%"]


def test_a_childs_objects_are_not_shown(capsys):
    def forks(comm):
        if not (child := os.fork()):
            display("the child's")  # noqa: F821
            os._exit(0)
        os.waitpid(child, 0)
        display("the rank's")  # noqa: F821

    run(forks, world_size=1)
    assert capsys.readouterr().out == '[rank 0] "the rank\'s"\n'
