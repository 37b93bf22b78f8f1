"""A script that calls ``labkit.run`` at its top level, which each rank comes to as well."""

import os
import subprocess
import sys
import tempfile

import pytest

SCRIPT = """\
import labkit

def rank_of(comm):
    return comm.rank

labkit.run(rank_of, world_size=2, device="cpu")
"""


@pytest.mark.fresh
def test_its_ranks_leave_no_file_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    # Not tmp_path: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TMPDIR": folder}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120
        )
        left = os.listdir(folder)
    assert done.returncode == 1
    assert 'under if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert left == []
