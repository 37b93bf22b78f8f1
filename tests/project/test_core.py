"""The core is a small package on its own: see tests/core.py. ``make test-core`` runs all of it."""

import subprocess

import core
import pytest

QUICK = "test_alone or schedules or test_costs or test_config or test_trace"


@pytest.mark.fresh
def test_without_the_course_the_core_imports_and_its_tests_pass(tmp_path):
    """All tests are collected: one that imports the course would be an error here."""
    core.copy_core(tmp_path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # Plain asserts say enough here: to rewrite those of all tests takes longer than the tests.
    words = ["-q", "--assert=plain", "-k", QUICK]
    done = core.run_tests(tmp_path, *words, timeout=300, **pipes)
    assert done.returncode == 0, done.stdout
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed > 100, done.stdout
