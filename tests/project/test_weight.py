"""Weight: the Python lines of each package stay within what they are allowed.

A change may raise a number by what its issue allows, and says so in its message.
``python tests/project/test_weight.py`` prints the table as it is now.
"""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Package -> Python lines at most.
LIMITS = {
    "data": 60,
    "labkit": 26950,
    "notebooks": 900,
    "tests": 27500,
    "tools": 1710,
    "workbook": 16660,
}


def weigh() -> dict[str, int]:
    """Return the Python lines of each package, of the files under git."""
    command = ["git", "ls-files", "*.py", "*.pyi"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git clone: which files belong to the repository is not known")
    lines = Counter()
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            package = name.split("/")[0]
            lines[package] += (ROOT / name).read_text().count("\n")
    return dict(sorted(lines.items()))


def test_every_package_stays_within_its_lines():
    lines = weigh()
    assert lines.keys() == LIMITS.keys(), "a new package, or one that went: LIMITS lists all"
    heavier = {
        package: (now, LIMITS[package]) for package, now in lines.items() if now > LIMITS[package]
    }
    assert not heavier, f"(lines now, lines at most): {heavier}"


if __name__ == "__main__":
    for package, lines in weigh().items():
        print(f'    "{package}": {lines},')
