import pytest


@pytest.fixture
def refused(capsys):
    """Run a command that is used wrongly: exit 2 and one line, which is returned."""
    # Not at the top: torch reads what tests/conftest.py sets, and must be imported after it.
    from labkit.__main__ import main

    def run(*words):
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        printed = capsys.readouterr()
        assert (caught.value.code, printed.out) == (2, "")
        (line,) = printed.err.splitlines()
        assert line.startswith("labkit: error: ")
        return line

    return run
