"""The clock that hardly moves while a process waits for a core, on a made-up ``/proc``."""

import os

import pytest

from labkit.runtime.between_hosts import patience
from labkit.runtime.between_hosts.patience import Patience


class Machine:
    """The clock and the threads of one process, 7, as the system would tell them."""

    def __init__(self, folder):
        self.folder, self.now_s = folder, 100.0

    def monotonic(self):
        return self.now_s

    def passes(self, passed_s, **waited_s):
        """Some time passes, in which threads wait for a core."""
        self.now_s += passed_s
        for thread, more_s in waited_s.items():
            file = self.folder / "7/task" / thread / "schedstat"
            file.parent.mkdir(parents=True, exist_ok=True)
            before = int(file.read_text().split()[1]) if file.exists() else 0
            file.write_text(f"123 {before + int(more_s * 1e9)} 4\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setattr(patience, "PROCESSES", tmp_path)
    monkeypatch.setattr(patience, "time", made)
    return made


class TestPatience:
    def test_an_idle_process_uses_all_time(self, machine):
        machine.passes(0, main=50)
        clock = Patience([7])
        machine.passes(2, main=0)
        assert clock.look() == pytest.approx(2)
        assert clock.used_s == pytest.approx(2)

    def test_time_without_a_core_does_not_count(self, machine):
        machine.passes(0, main=50, gloo=1)
        clock = Patience([7])
        # One thread wakes the other, and both had to wait.
        machine.passes(1, main=0, gloo=0.75)
        assert clock.look() == pytest.approx(0.25)
        machine.passes(1, main=0.5, gloo=0)
        assert clock.look() == pytest.approx(0.75)

    def test_a_thread_that_comes_and_one_that_ends(self, machine):
        machine.passes(0, main=1)
        clock = Patience([7])
        machine.passes(1, new=0.5)
        assert clock.look() == pytest.approx(0.5)
        (machine.folder / "7/task/new/schedstat").unlink()
        machine.passes(1)
        assert clock.look() == pytest.approx(1.5)

    def test_threads_that_always_wait_cannot_stop_it(self, machine):
        machine.passes(0, main=1)
        clock = Patience([7])
        for _ in range(20):
            machine.passes(1, main=1)
            clock.look()
        assert clock.used_s == pytest.approx(2)

    def test_where_the_system_does_not_tell_all_time_counts(self, machine):
        clock = Patience([7, 8])
        machine.passes(3)
        assert clock.look() == pytest.approx(3)

    def test_a_process_that_has_ended(self, machine):
        machine.passes(0, main=9)
        clock = Patience([7])
        machine.folder.joinpath("7").rename(machine.folder / "gone")
        machine.passes(1)
        assert clock.look() == pytest.approx(1)

    def test_this_process(self):
        clock = Patience([os.getpid()])
        assert 0 <= clock.look() <= clock.look()
