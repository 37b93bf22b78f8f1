"""What a rank's process is given before the learner's function starts, and what it has not."""

import os
import pdb
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from ranks import end_server, travel_by_value

from labkit import RunConfig, WorkerError, run, strategies, warm_up
from labkit.runtime import forkserver
from labkit.runtime.prepare import seed_random_numbers
from labkit.training.loop import fit

travel_by_value(__name__)


def draws(comm):
    """Two numbers of each generator, so that a generator that repeats itself shows, too."""
    python = random.random(), random.random()
    numpy = np.random.rand(2).tolist()
    return [*python, *numpy, *torch.rand(2).tolist(), torch.randint(2**40, (1,)).item()]


class TestRandomNumbers:
    def test_each_rank_draws_its_own_and_the_same_in_each_run(self):
        first = run(draws, world_size=3).values
        drawn = [number for rank in first for number in rank]
        assert len(set(drawn)) == len(drawn)
        assert run(draws, world_size=3).values == first

    def test_the_world_size_and_the_callers_generators_change_nothing(self):
        first = run(draws, world_size=2).values
        torch.manual_seed(77)
        random.seed(77)
        assert run(draws, world_size=3).values[:2] == first

    def test_a_seed_of_the_function_wins(self):
        def seeded(comm):
            torch.manual_seed(5)
            return torch.rand(3).tolist()

        one, other = run(seeded, world_size=2).values
        assert one == other == torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()

    def test_no_two_ranks_draw_alike(self):
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        drawn = set()
        try:
            for rank in range(64):
                seed_random_numbers(rank)
                drawn |= {random.random(), np.random.rand(), torch.rand(1).item()}
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        assert len(drawn) == 3 * 64


def reads(comm, how):
    """Read the keyboard in one of several ways."""
    if how == "input":
        input("name? ")
    elif how == "breakpoint":
        breakpoint()
    elif how == "pdb":
        pdb.set_trace()
    elif how == "Pdb":
        pdb.Pdb().set_trace()
        comm.barrier()
    elif how == "torch":
        torch.distributed.breakpoint(0)
    elif how == "lines":
        list(sys.stdin)
    else:
        getattr(sys.stdin, how)()


class TestKeyboard:
    @pytest.mark.parametrize(
        ("how", "what", "instead"),
        [
            ("input", r"input\(\)", "ask before the run"),
            ("lines", r"input\(\)", "ask before the run"),
            ("read", "sys.stdin", "ask before the run"),
            ("readlines", r"input\(\)", "ask before the run"),
            ("breakpoint", r"breakpoint\(\)", "print what you want to see"),
            ("pdb", r"pdb\.set_trace\(\)", "print what you want to see"),
            ("Pdb", r"input\(\)", "ask before the run"),
            ("torch", "a debugger", "print what you want to see"),
        ],
    )
    def test_a_rank_has_none_and_says_so_at_the_learners_line(self, how, what, instead, capsys):
        with pytest.raises(WorkerError, match=f"{what} reads the keyboard, and a rank") as caught:
            run(reads, how, world_size=1)
        assert f"Next step: {instead}" in str(caught.value)
        assert os.path.basename(__file__) in caught.value.location

    def test_breakpoints_that_are_turned_off_stay_off(self, monkeypatch):
        monkeypatch.setenv("PYTHONBREAKPOINT", "0")

        def passes(comm):
            breakpoint()
            return comm.rank

        assert run(passes, world_size=2).values == [0, 1]

    def test_programs_that_a_rank_starts_find_an_empty_input(self):
        assert run(lambda comm: os.read(0, 10), world_size=1).values == [b""]


def variables(comm, *names):
    return [os.environ.get(name) for name in names]


class TestVariables:
    def test_what_is_set_changed_or_removed_after_the_start_arrives(self, monkeypatch):
        run(variables, world_size=1)
        monkeypatch.setenv("LABKIT_TEST_MARK", "set")
        assert run(variables, "LABKIT_TEST_MARK", world_size=2).values == [["set"]] * 2
        monkeypatch.setenv("LABKIT_TEST_MARK", "changed, with ü")
        assert run(variables, "LABKIT_TEST_MARK", world_size=1).values == [["changed, with ü"]]
        monkeypatch.delenv("LABKIT_TEST_MARK")
        assert run(variables, "LABKIT_TEST_MARK", world_size=1).values == [[None]]

    def test_what_is_removed_after_the_start_is_gone_in_the_ranks(self, monkeypatch):
        monkeypatch.setitem(forkserver._variables_at_start, "HOME", os.environ["HOME"])
        monkeypatch.delenv("HOME")
        assert run(variables, "HOME", "RANK", world_size=1).values == [[None, "0"]]

    def test_what_libraries_have_read_before_is_said_once(self, monkeypatch, capsys):
        warm_up()
        run(variables, world_size=1)
        capsys.readouterr()
        monkeypatch.setenv("OMP_PROC_BIND", "close")
        monkeypatch.setenv("LABKIT_TEST_MARK", "arrives")
        names = "OMP_PROC_BIND", "LABKIT_TEST_MARK"
        assert run(variables, *names, world_size=1).values == [["close", "arrives"]]
        said = capsys.readouterr().err
        assert said.startswith("OMP_PROC_BIND has changed since labkit.warm_up()")
        assert "Next step: restart the kernel" in said
        run(variables, world_size=1)
        assert "OMP_PROC_BIND" not in capsys.readouterr().err
        monkeypatch.setenv("OMP_PROC_BIND", "spread")
        run(variables, world_size=1)
        assert "OMP_PROC_BIND" in capsys.readouterr().err

    @pytest.mark.fresh
    def test_what_is_set_before_the_start_is_no_news(self, light_server, monkeypatch, capsys):
        end_server()
        monkeypatch.setenv("OMP_PROC_BIND", "close")
        assert run(variables, "OMP_PROC_BIND", world_size=1).values == [["close"]]
        assert capsys.readouterr().err == ""
        end_server()


SWITCHES = """
import torch
from labkit.runtime.prepare import allow_tf32

def shown():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    new = {part.fp32_precision for part in (cuda.matmul, cudnn.conv, cudnn.rnn)}
    return cuda.matmul.allow_tf32, cudnn.allow_tf32, *new

assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
for before in (
    "",
    "torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    "torch.set_float32_matmul_precision('medium')",
):
    for allowed, name in ((False, "ieee"), (True, "tf32"), (False, "ieee")):
        exec(before)
        allow_tf32(allowed)
        assert shown() == (allowed, allowed, name), (before, allowed, shown())
    if not before:
        with torch.backends.cudnn.flags(enabled=False):
            pass
"""


class TestTf32:
    def test_it_is_off_whatever_was_set_before_and_both_switches_say_so(self):
        """With the variable of NVIDIA's containers, which only sets the default."""
        environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
        command = [sys.executable, "-W", "error", "-c", SWITCHES]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_it_is_off_in_a_run_and_on_where_a_training_run_asks_for_it(self):
        def precisions(comm):
            from torch.backends import cuda, cudnn

            return [part.fp32_precision for part in (cuda.matmul, cudnn.conv, cudnn.rnn)]

        def trained(comm, tf32):
            config = RunConfig(tf32=tf32, model="mlp", train_size=8)
            fit(comm, config, strategies.get("single")(), verbose=False)
            return precisions(comm)

        def all_in_turn(comm):
            return precisions(comm), trained(comm, True), trained(comm, False)

        off, on = ["ieee"] * 3, ["tf32"] * 3
        assert run(all_in_turn, world_size=1, device="cpu").values == [(off, on, off)]
