"""PyTorch's own tests of a backend, with our name in place of gloo's (some minutes)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("torch_suite.py")
# Those that pass on gloo and cannot pass here, and why.
FAIL = {"test_ddp_logging_data_cpu": "DDP writes down settings of gloo's network for gloo alone"}
PASS_AT_LEAST = 90


@pytest.mark.more
def test_pytorchs_own_tests_pass_under_our_name(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    words = [sys.executable, RUNNER, "labkit", tmp_path]
    run = subprocess.run(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=1800
    )
    outcomes = tmp_path / "outcomes.json"
    assert outcomes.exists(), run.stderr[-2000:].decode()
    by_name = json.loads(outcomes.read_text())
    failed = {n: text for n, text in by_name.items() if text not in ("passed", "skipped")}
    assert failed.keys() <= FAIL.keys(), failed
    assert list(by_name.values()).count("passed") >= PASS_AT_LEAST
