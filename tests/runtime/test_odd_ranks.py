"""Functions that do odd things to their process: the run still ends whole and says why."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from ranks import is_alive, running_ranks, travel_by_value, wait_until

from labkit import WorkerError, run

travel_by_value(__name__)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert wait_until(lambda: not running_ranks(), 2), f"ranks left: {running_ranks()}"


class TestChildrenOfRanks:
    @pytest.mark.parametrize("how", ["returns", "raises", "sleeps", "is a program"])
    def test_they_report_nothing_and_end_with_the_run(self, how):
        def has_a_child(comm, how):
            if how == "is a program":
                return subprocess.Popen(["sleep", "60"]).pid
            if child := os.fork():
                return child
            if how == "raises":
                raise ValueError("in the child")
            time.sleep(60 * (how == "sleeps"))
            return "the child's"

        children = run(has_a_child, how, world_size=2).values
        assert all(isinstance(pid, int) for pid in children)
        assert wait_until(lambda: not any(map(is_alive, children)), 5)

    def test_they_end_with_a_rank_that_is_killed(self, tmp_path):
        def leaves_a_child(comm, folder):
            if comm.rank == 1:
                child = subprocess.Popen(["sleep", "60"])
                (folder / str(child.pid)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
            run(leaves_a_child, tmp_path, world_size=2)
        (child,) = (int(path.name) for path in tmp_path.iterdir())
        assert wait_until(lambda: not is_alive(child), 5)


class TestWhatIsToldIsTold:
    def test_a_signal_without_a_name(self):
        def hit(comm):
            os.kill(os.getpid(), signal.SIGRTMIN + 5)

        number = signal.SIGRTMIN + 5
        with pytest.raises(WorkerError, match=f"rank 0 was killed by signal {number} in mid-run"):
            run(hit, world_size=1)

    @pytest.mark.parametrize("how", ["none", "closed", "fails"])
    def test_a_result_comes_whatever_lies_in_the_place_of_stdout(self, how):
        def spoils(comm, how):
            class Fails:
                def flush(self):
                    raise RuntimeError("no flush")

            if how == "closed":
                sys.stdout.close()
            else:
                sys.stdout = None if how == "none" else Fails()
            return comm.rank

        assert run(spoils, how, world_size=2).values == [0, 1]

    def test_an_error_that_cannot_make_its_text(self):
        class Mute(Exception):
            def __str__(self):
                raise KeyError("no text")

        def fails(comm):
            raise Mute

        with pytest.raises(WorkerError, match=r"rank 0 raised Mute: \(its str\(\) raised Key"):
            run(fails, world_size=1)

    def test_an_exit_with_what_cannot_make_its_text(self):
        class Mute:
            def __repr__(self):
                raise KeyError("no text")

        with pytest.raises(WorkerError, match=r"rank 0 called sys\.exit\(\(its str\(\) raised"):
            run(lambda comm: sys.exit(Mute()), world_size=1)

    def test_all_parts_of_a_group_of_errors(self):
        def fails(comm):
            raise ExceptionGroup("two", [ValueError("the first"), KeyError("the second")])

        with pytest.raises(WorkerError) as caught:
            run(fails, world_size=1)
        assert "ValueError: the first" in str(caught.value)
        assert "KeyError: 'the second'" in str(caught.value)

    def test_a_text_of_megabytes_is_cut_and_counted(self):
        def fails(comm):
            raise ValueError("begins " + 5_000_000 * "x" + " ends")

        with pytest.raises(WorkerError) as caught:
            run(fails, world_size=1)
        text = str(caught.value)
        assert len(text) < 60_000
        assert "\n... 4,980,012 characters cut ...\n" in text
        assert "begins x" in text
        assert "x ends" in text


class TestResultsThatCannotTravel:
    def test_what_contains_itself(self):
        def endless(comm):
            value = [torch.ones(1)]
            value.append(value)
            return value

        with pytest.raises(WorkerError, match=r"cannot be sent back: value \(builtins.list\)"):
            run(endless, world_size=1)

    def test_what_leaves_while_it_is_pickled(self):
        class Leaves:
            def __reduce__(self):
                raise SystemExit(3)

        with pytest.raises(
            WorkerError, match=r"has a result that cannot be sent back: value\['it'\]"
        ):
            run(lambda comm: {"it": Leaves()}, world_size=1)

    def test_what_cannot_be_made_anew(self):
        def picky(comm):
            class Picky:
                def __reduce__(self):
                    return int, ("not a number",)

            return Picky() if comm.rank else None

        words = (
            "rank 1 returned a value that cannot be unpickled here: ValueError: invalid literal"
        )
        with pytest.raises(WorkerError, match=words):
            run(picky, world_size=2)


PROGRAM = """
    import os, signal, sys, threading
    from labkit import run, warm_up

    def rank_of(comm):
        return comm.rank

    if __name__ == "__main__":
        warm_up(training=False)
        {before}
        print(run(rank_of, world_size=2).values, file=sys.stderr)
"""


@pytest.mark.fresh
class TestOddPrograms:
    def said(self, tmp_path, before="", **settings):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(PROGRAM).format(before=before or "pass"))
        pipes = {"stderr": subprocess.PIPE, "text": True, "timeout": 120}
        return subprocess.run([sys.executable, script], **pipes, **settings).stderr

    def test_one_with_stdin_and_stdout_closed_and_a_temporary_folder_of_a_very_long_path(
        self, tmp_path
    ):
        def close():
            os.close(0)
            os.close(1)

        folder = tmp_path / ("x" * 100)  # too long for the path of a socket in it
        folder.mkdir()
        settings = {"preexec_fn": close, "env": os.environ | {"TMPDIR": str(folder)}}
        assert self.said(tmp_path, **settings) == "[0, 1]\n"

    def test_ctrl_c_during_the_first_import_leaves_the_next_run_working(self, tmp_path):
        lines = [
            "for after_s in (0.01, 0.4):",
            "    try:",
            "        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()",
            "        run(lambda comm: threading.Event().wait(), world_size=2)",
            "    except KeyboardInterrupt:",
            "        print('stopped', file=sys.stderr)",
        ]
        said = self.said(tmp_path, "\n    ".join(lines))
        assert said == "stopped\nstopped\n[0, 1]\n"


def test_an_interrupt_is_held_back_to_the_end_of_the_block_and_in_other_threads_not():
    from labkit.runtime.preload import interrupts_later

    passed = []

    def block():
        with interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            passed.append("the block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert passed == ["the block"]

    def elsewhere():
        with interrupts_later():
            passed.append("a thread")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert passed == ["the block", "a thread"]
