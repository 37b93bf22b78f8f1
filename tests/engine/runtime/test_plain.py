"""What ranks tell each other over a network: what travels, and that nothing is executed."""

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from labkit import DeadlockError, WorkerError
from labkit.engine.comm.peak_memory import PeakMemory
from labkit.engine.runtime.messages import Report
from labkit.engine.runtime.plain import (
    dump_error,
    dump_plain,
    dump_report,
    load_error,
    load_plain,
    load_report,
)
from labkit.engine.tracing import Span

SPANS = (
    Span(1, "compute", 0.1, 0.25),
    Span(1, "share_reduce", 0.25, 1 / 3, 4096, 0, 2, ((-1, -1, 7),), ((1, 0, 3),), (5, 0.125)),
)
MEMORY = PeakMemory(5, {"cuda:0": 6})
SENT = {"messages": 3, "bytes_sent": 2**40, "device": "cuda:0 of machine 1", "duration_s": 0.1}
REPORT = Report(1, "value", dump_plain({"loss": [0.5]}), SPANS, peak_memory=MEMORY, **SENT)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_report_arrives_as_it_was():
    found = load_report(dump_report(REPORT), 1)
    assert found == replace(REPORT, is_plain=True)
    for name in ("meets", "messages", "call"):
        arrived = [getattr(span, name) for span in found.spans]
        assert arrived == [getattr(span, name) for span in SPANS]
    assert load_plain(found.payload) == {"loss": [0.5]}


def test_plain_values_tensors_and_arrays_travel():
    value = [
        1,
        2.5,
        "a",
        b"b",
        True,
        2**80,
        {"a": (1, [2, {"b": {3}}]), 4: None},
        np.float64(0.25),
    ]
    assert load_plain(dump_plain(value)) == value
    weight = torch.arange(6.0).view(2, 3).t()
    found = load_plain(dump_plain({"w": nn.Parameter(weight) * 1, "n": np.arange(3.0)}))
    assert torch.equal(found["w"], weight)
    assert np.array_equal(found["n"], np.arange(3.0))


def test_a_pickle_of_a_stranger_is_not_executed(tmp_path):
    path, saved = tmp_path / "proof", tmp_path / "saved"
    bomb = Bomb(str(path))
    torch.save(bomb, saved)
    for data in (pickle.dumps(bomb, protocol=2), saved.read_bytes()):
        with pytest.raises(Exception, match=r"(?i)unsupported|weights|load"):
            load_plain(data)
        with pytest.raises(ConnectionError, match="the report of rank 1 is not one that labkit"):
            load_report(data, 1)
    assert not path.exists()
    torch.load(saved, weights_only=False)
    assert path.exists()


@pytest.mark.parametrize("change", [{"rank": 0}, {"kind": "raised"}, {"more": 1}, {"spans": "7"}])
def test_a_report_that_labkit_does_not_write_is_refused(change):
    data = dump_plain(load_plain(dump_report(REPORT)) | change)
    with pytest.raises(ConnectionError, match="the report of rank 1 is not one that labkit"):
        load_report(data, 1)


def test_an_error_arrives_without_control_characters():
    found = load_error(dump_error(DeadlockError("a\x1b[31m\n  b", rank=3, location="h")).encode())
    assert (type(found), str(found), found.rank) == (DeadlockError, "a [31m\n  b", 3)
    for data in (b"", b"7", b'["SystemExit", 1, 2, 3, 4]', b'["", "", "1", "", ""]', b"[" * 10**5):
        assert type(load_error(data)) is WorkerError
        assert "that no rank writes" in str(load_error(data))
