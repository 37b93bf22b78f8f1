import threading
from functools import partial

import pytest

from workbook.widgets.job import Job


class Said(list):
    """Remembers what a job says, and can be waited for."""

    def __call__(self, *words):
        self.append(words)


@pytest.fixture
def said():
    return Said()


def endless(begun):
    """Work that only an interrupt ends."""
    begun.set()
    while True:
        threading.Event().wait(0.01)


class TestJob:
    def test_it_works_in_the_background_and_says_how_it_went(self, said):
        job, go_on = Job(said), threading.Event()
        job.start("working ...", lambda: f"it went {go_on.wait()}")
        assert said == [("working ...", "")]
        go_on.set()
        job.join()
        assert said[1:] == [("", "it went True")]

    def test_an_error_is_said(self, said):
        job = Job(said)
        job.start("dividing ...", lambda: str(1 // 0))
        job.join()
        assert said[-1] == ("", "ZeroDivisionError: integer division or modulo by zero")

    def test_a_second_job_is_not_started(self, said):
        job, go_on = Job(said), threading.Event()
        job.start("first ...", lambda: str(go_on.wait()))
        job.start("second ...", lambda: "never")
        go_on.set()
        job.join()
        assert said == [("first ...", ""), ("", "True")]

    def test_stop_interrupts_it_and_the_next_one_is_not_interrupted(self, said):
        job = Job(said)
        for _ in range(5):
            begun = threading.Event()
            job.start("working ...", partial(endless, begun))
            begun.wait()
            job.stop()
            job.stop()
            job.join()
            assert said[-1] == ("", "stopped")
            job.stop()
            job.start("working ...", lambda: "done")
            job.join()
            assert said[-1] == ("", "done")

    def test_a_stop_at_any_moment_leaves_a_job_that_works(self, said):
        """Also one that comes when the work has just ended."""
        job = Job(said)
        for _ in range(200):
            job.start("working ...", lambda: "done")
            job.stop()
            job.join()
            assert said[-1] in [("", "done"), ("", "stopped")]
        job.start("working ...", lambda: "done")
        job.join()
        assert said[-1] == ("", "done")
