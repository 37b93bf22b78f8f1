"""The process of a rank: what it is given, and what odd functions do to it.

Whatever they do, the run ends whole and says why.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from ranks import end_server, is_alive, running_ranks, server_pid, travel_by_value, wait_until

from labkit import RunConfig, WorkerError, run, strategies, warm_up
from labkit.runtime import preload
from labkit.training.loop import fit

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

    def test_they_end_with_a_rank_that_is_killed_and_do_not_hide_its_end(self, tmp_path):
        def leaves_a_child(comm, folder):
            if comm.rank == 1:
                if (child := os.fork()) == 0:
                    time.sleep(60)
                (folder / str(child)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        started_s = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL in mid-run"):
            run(leaves_a_child, tmp_path, world_size=2)
        assert time.monotonic() - started_s < 4
        (child,) = (int(path.name) for path in tmp_path.iterdir())
        assert wait_until(lambda: not is_alive(child), 5)

    @pytest.mark.slow
    def test_a_thread_that_a_rank_leaves_behind_does_not_hold_the_run(self):
        def leaves_a_thread(comm):
            threading.Thread(target=time.sleep, args=(60,)).start()
            return comm.rank

        started_s = time.monotonic()
        assert run(leaves_a_thread, world_size=2).values == [0, 1]
        assert time.monotonic() - started_s < 8


class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")

    __repr__ = __str__


class TestErrors:
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

    def test_what_cannot_make_its_text(self):
        def fails(comm):
            raise Mute

        with pytest.raises(WorkerError, match=r"rank 0 raised Mute: \(its str\(\) raised Key"):
            run(fails, world_size=1)
        with pytest.raises(WorkerError, match=r"rank 0 called sys\.exit\(\(its str\(\) raised"):
            run(lambda comm: sys.exit(Mute()), world_size=1)

    def test_all_parts_of_a_group_of_errors(self):
        def fails(comm):
            raise ExceptionGroup("two", [ValueError("the first"), KeyError("the second")])

        with pytest.raises(WorkerError, match=r"(?s)ValueError: the first.*KeyError: 'the sec"):
            run(fails, world_size=1)

    def test_a_text_of_megabytes_is_cut_and_counted(self):
        def fails(comm):
            raise ValueError("begins " + 5_000_000 * "x" + " ends")

        with pytest.raises(WorkerError, match=r"(?s)begins x.*4,980,012 characters cut .*x ends"):
            run(fails, world_size=1)


class TestWhatCannotTravel:
    def test_a_result_that_contains_itself_or_leaves_while_it_is_pickled(self):
        def endless(comm):
            value = [torch.ones(1)]
            value.append(value)
            return value

        class Leaves:
            def __reduce__(self):
                raise SystemExit(3)

        with pytest.raises(WorkerError, match=r"cannot be sent back: value \(builtins.list\)"):
            run(endless, world_size=1)
        with pytest.raises(WorkerError, match=r"cannot be sent back: value\['it'\]"):
            run(lambda comm: {"it": Leaves()}, world_size=1)

    @pytest.mark.parametrize(
        ("make", "args", "says"),
        [(int, ("not a number",), "ValueError: invalid lit"), (sys.exit, (3,), "SystemExit: 3")],
        ids=["raises", "exits"],
    )
    def test_a_result_that_cannot_be_made_anew(self, make, args, says):
        def picky(comm):
            class Picky:
                def __reduce__(self):
                    return make, args

            return Picky() if comm.rank else None

        words = f"rank 1 returned a value that cannot be unpickled here: {says}"
        with pytest.raises(WorkerError, match=words):
            run(picky, world_size=2)

    def test_functions_whose_call_does_nothing(self):
        async def waits(comm):
            pass

        def yields(comm):
            yield comm.rank

        with pytest.raises(ValueError, match=r"waits is an async function.* asyncio\.run\(waits"):
            run(waits, world_size=1)
        with pytest.raises(ValueError, match=r"yields is a generator function .* return a list"):
            run(yields, world_size=1)


def draws(comm):
    """Two numbers of each generator, so that a generator that repeats itself shows, too."""
    python = random.random(), random.random()
    numpy = np.random.rand(2).tolist()
    return [*python, *numpy, *torch.rand(2).tolist(), torch.randint(2**40, (1,)).item()]


class TestRandomNumbers:
    def test_each_rank_draws_its_own_and_the_same_in_each_run_of_any_size(self):
        first = run(draws, world_size=3).values
        drawn = [number for rank in first for number in rank]
        assert len(set(drawn)) == len(drawn)
        torch.manual_seed(77)
        random.seed(77)
        assert run(draws, world_size=2).values == first[:2]


def variables(comm, *names):
    return [os.environ.get(name) for name in names]


def test_variables_that_are_set_changed_or_removed_after_the_start_arrive(monkeypatch):
    run(variables, world_size=1)
    for value in ("set", "changed, with ü"):
        monkeypatch.setenv("LABKIT_TEST_MARK", value)
        assert run(variables, "LABKIT_TEST_MARK", world_size=2).values == [[value]] * 2
    monkeypatch.delenv("HOME")
    assert run(variables, "HOME", "RANK", world_size=1).values == [[None, "0"]]


def test_tf32_is_off_in_a_run_and_on_where_a_training_run_asks_for_it():
    def precisions(comm):
        from torch.backends import cuda, cudnn

        return [part.fp32_precision for part in (cuda.matmul, cudnn.conv, cudnn.rnn)]

    def all_in_turn(comm):
        found = [precisions(comm)]
        for tf32 in (True, False):
            config = RunConfig(amp="tf32" if tf32 else None, model="mlp", train_size=8)
            fit(comm, config, strategies.get("single")(), verbose=False)
            found.append(precisions(comm))
        return found

    off, on = ["ieee"] * 3, ["tf32"] * 3
    assert run(all_in_turn, world_size=1, device="cpu").values == [[off, on, off]]


def cuda_in_a_rank(comm):
    """Whether the forkserver has asked for GPUs; what has become of CUDA; what is visible."""
    spoilt = torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized()
    return "asks_for_gpus" in sys.modules, *spoilt, *torch.cuda._parse_visible_devices()


@pytest.mark.fresh
@pytest.mark.usefixtures("light_server")
class TestForkserver:
    def test_a_module_that_asks_for_gpus_when_it_is_imported_spoils_nothing(
        self, tmp_path, monkeypatch
    ):
        (tmp_path / "asks_for_gpus.py").write_text(
            "import torch\nHAS = torch.cuda.is_available()\n"
        )
        end_server()
        paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", paths)
        monkeypatch.setattr(preload, "FOR_RANKS", [*preload.FOR_RANKS, "asks_for_gpus"])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        found = run(cuda_in_a_rank, world_size=2, device="cpu").values
        assert found == [(True, False, False)] * 2
        # GPUs that are chosen after its start are those of the ranks.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        assert run(cuda_in_a_rank, world_size=1, device="cpu").values == [
            (True, False, False, 3, 1)
        ]

    def test_one_that_lacks_what_training_needs_is_replaced(self, monkeypatch):
        end_server()
        warm_up(training=False)
        server = server_pid()
        monkeypatch.setattr(preload, "FOR_TRAINING", ["labkit.collectives.ring"])
        is_loaded = lambda comm: "labkit.collectives.ring" in sys.modules  # noqa: E731
        assert run(is_loaded, world_size=1).values == [False]
        assert server_pid() == server
        warm_up()
        assert run(is_loaded, world_size=1).values == [True]
        assert not is_alive(server)

    def test_a_run_that_loses_it_names_it_and_the_next_run_works(self):
        def works(comm, server):
            os.kill(server, signal.SIGKILL)
            time.sleep(60)

        run(variables, world_size=1)
        with pytest.raises(WorkerError, match=r"the forkserver, pid \d+\) has ended: SIGKILL"):
            run(works, server_pid(), world_size=2)
        assert run(lambda comm: comm.rank, world_size=2).values == [0, 1]


PROGRAM = """
    import os, resource, signal, sys, threading
    from labkit import run

    def rank_of(comm):
        return comm.rank

    if __name__ == "__main__":
        {before}
        print(run(rank_of, world_size=2).values, file=sys.stderr)
"""


@pytest.mark.fresh
class TestOddPrograms:
    def said(self, tmp_path, *lines):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(PROGRAM).format(before="\n        ".join(lines)))
        pipes = {"stderr": subprocess.PIPE, "text": True, "timeout": 120}
        return subprocess.run([sys.executable, script], **pipes).stderr

    def test_ctrl_c_during_the_first_import_leaves_the_next_run_working(self, tmp_path):
        lines = [
            "for after_s in (0.01, 0.4):",
            "    try:",
            "        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()",
            "        run(lambda comm: threading.Event().wait(), world_size=2)",
            "    except KeyboardInterrupt:",
            "        print('stopped', file=sys.stderr)",
        ]
        assert self.said(tmp_path, *lines) == "stopped\nstopped\n[0, 1]\n"

    def test_a_limit_on_files_is_named(self, tmp_path):
        said = self.said(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000,) * 2)")
        assert "File too large: 'the memory of 2 ranks (ulimit -f" in said.splitlines()[-1]


def test_an_interrupt_is_held_back_to_the_end_of_the_block_and_in_other_threads_not():
    passed = []

    def block():
        with preload.interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            passed.append("the block")

    with pytest.raises(KeyboardInterrupt):
        block()
    thread = threading.Thread(target=lambda: preload.interrupts_later().__enter__())
    thread.start()
    thread.join()
    assert passed == ["the block"]
