"""Record the slowest tests, and start them first: no worker then has a long test at the end.

``make slowest`` runs all tests and writes the record, data/results/slowest_tests.json.
"""

import json
import time
from collections import Counter
from pathlib import Path

RECORD = Path(__file__).resolve().parents[1] / "data" / "results" / "slowest_tests.json"
NUM_RECORDED = 40


def longest_first(items: list) -> None:
    """Sort the collected tests: classes and files with the longest recorded tests come first.

    Last are those that end the forkserver, so that few tests wait for a new one. xdist hands them
    out whole, in this order (``--no-loadscope-reorder``).
    """
    rows = json.loads(RECORD.read_text())["slowest"] if RECORD.exists() else []
    seconds: Counter = Counter()
    for row in rows:
        seconds[scope_of(row["test"])] += row["seconds"]
    ending = {
        scope_of(item.nodeid)
        for item in items
        if "light_server" in getattr(item, "fixturenames", ())
    }
    scopes = {item: scope_of(item.nodeid) for item in items}
    items.sort(key=lambda item: (scopes[item] in ending, -seconds[scopes[item]]))


def scope_of(test: str) -> str:
    """The tests that run one after another in one process: of a class, or a file."""
    return test.rpartition("::")[0]


def scheduling(config, log):
    """xdist's scheduler of whole scopes, with ours."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    return Scheduling(config, log)


def record(path: Path, reports: list, started_s: float) -> None:
    """Write the slowest tests with their seconds, including set-up and tear-down."""
    from labkit.devices import hardware, versions
    from labkit.files import write_atomically

    seconds: Counter = Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration
    found = {
        "command": "make slowest",
        "hardware": hardware(),
        "versions": versions(),
        "tests": len(seconds),
        "test_seconds": round(seconds.total(), 1),
        "wall_seconds": round(time.time() - started_s, 1),
        "slowest": [
            {"test": test, "seconds": round(duration, 2)}
            for test, duration in seconds.most_common(NUM_RECORDED)
        ],
    }
    write_atomically(path, json.dumps(found, indent=1) + "\n")
