import threading

from workbook.widgets.job import Job


class Said(list):
    """Remembers what a job says."""

    def __call__(self, *words):
        self.append(words)


def test_it_works_in_the_background_one_at_a_time_and_says_how_it_went():
    said, go_on = Said(), threading.Event()
    job = Job(said)
    job.start("working ...", lambda: f"it went {go_on.wait()}")
    job.start("second ...", lambda: "never")
    assert said == [("working ...", "")]
    go_on.set()
    job.join()
    assert said[1:] == [("", "it went True")]
    job.start("dividing ...", lambda: str(1 // 0))
    job.join()
    assert said[-1] == ("", "ZeroDivisionError: integer division or modulo by zero")


def test_a_stop_at_any_moment_leaves_a_job_that_works():
    """Also one that comes when the work has just ended."""
    said = Said()
    job = Job(said)
    for _ in range(200):
        job.start("working ...", lambda: "done")
        job.stop()
        job.join()
        assert said[-1] in [("", "done"), ("", "stopped")]
    job.start("working ...", lambda: "done")
    job.join()
    assert said[-1] == ("", "done")
