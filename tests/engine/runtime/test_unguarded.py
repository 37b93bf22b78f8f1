"""A script that calls ``labkit.run`` at its top level, which each rank comes to as well."""

import os
import subprocess
import sys
import tempfile

import pytest

SCRIPT = "import labkit\nlabkit.run(lambda comm: comm.rank, world_size=2, device='cpu')\n"


@pytest.mark.fresh
def test_its_ranks_leave_no_file_behind(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    # Not tmp_path: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        left = os.listdir(folder)
    assert done.returncode == 1
    assert 'under if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert left == []
