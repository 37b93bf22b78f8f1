"""Warms the forkserver up before the timeouts of the tests here begin."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def warm():
    # Not at the top: tests/conftest.py sets up this process before torch is imported.
    from labkit import run

    run(lambda comm: None, world_size=1)
