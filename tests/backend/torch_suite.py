"""PyTorch's own tests of a backend with another name: ``python torch_suite.py NAME FOLDER``.

They are in PyTorch's package, in ``torch.testing._internal.distributed.distributed_test``, and
written for the names "gloo" and "nccl". Here every "gloo" in their source is NAME. Two ranks each.
The outcome of each test is written to FOLDER/outcomes.json: "passed", "skipped", or the error.
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import types
import unittest
from pathlib import Path

try:
    import expecttest
except ImportError:
    # Only its base class is needed, for tests that compare with recorded text.
    expecttest = types.ModuleType("expecttest")
    expecttest.TestCase = unittest.TestCase
    sys.modules["expecttest"] = expecttest

import labkit

assert labkit  # it registers its backend
SUITE = "torch.testing._internal.distributed.distributed_test"
NAME, FOLDER = sys.argv[1], Path(sys.argv[2])
os.environ |= {"BACKEND": NAME, "WORLD_SIZE": "2", "TEMP_DIR": str(FOLDER)}

from torch.testing._internal import common_distributed  # noqa: E402

for _names in common_distributed.DistTestCases.backend_feature.values():
    if "gloo" in _names:
        _names.add(NAME)
common_distributed.DistTestCases.backend_feature["plugin"].add(NAME)


def load_suite() -> types.ModuleType:
    """Import the tests from a copy of their source."""
    path = FOLDER / "suite.py"
    if not path.exists():
        spec = importlib.util.find_spec(SUITE)
        path.write_text(Path(spec.origin).read_text().replace('"gloo"', f'"{NAME}"'))
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module("suite")


suite = load_suite()


class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Forked: this process has imported all that they need, and started no thread.
        self._start_processes(multiprocessing.get_context("fork").Process)


class Outcomes(unittest.TestResult):
    """Writes down how each test ended."""

    def __init__(self):
        super().__init__()
        self.by_name = {}

    def startTest(self, test):
        super().startTest(test)
        self.by_name[test._testMethodName] = "passed"

    def addSkip(self, test, reason):
        self.by_name[test._testMethodName] = "skipped"

    def addError(self, test, error):
        self.by_name[test._testMethodName] = str(error[1])

    addFailure = addError


if __name__ == "__main__":
    names = sys.argv[3:] or unittest.TestLoader().getTestCaseNames(Suite)
    outcomes = Outcomes()
    unittest.TestSuite(map(Suite, names)).run(outcomes)
    (FOLDER / "outcomes.json").write_text(json.dumps(outcomes.by_name))
