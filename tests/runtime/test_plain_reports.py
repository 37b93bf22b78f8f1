"""Reports between hosts: what travels, what is refused by name, and that nothing is executed."""

import json
import os
import pickle
import struct
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from labkit.comm.peak_memory import DeviceMemory, PeakMemory
from labkit.runtime.between_hosts.reports import (
    dump_plain,
    from_bytes,
    load_plain,
    to_bytes,
)
from labkit.runtime.between_hosts.verdict import MOST_BYTES, Verdict, with_hosts
from labkit.runtime.messages import Report, UnpicklableError
from labkit.tracing import Span

SPANS = (
    Span(1, "compute", 0.1, 0.25),
    Span(1, "share_reduce", 0.25, 1 / 3, 4096, 0, 2, ((-1, -1, 7),)),
)
REPORT = Report(
    1,
    "value",
    dump_plain({"loss": [0.5]}),
    spans=SPANS,
    messages=3,
    bytes_sent=2**40,
    device="cuda:0 of machine 1",
    peak_memory=PeakMemory(5, {"cuda:0": DeviceMemory(6, 7)}),
    duration_s=0.1,
)


@dataclass
class Mine:
    number: int


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_report_arrives_as_it_was():
    found = from_bytes(to_bytes(REPORT), 1)
    assert found == replace(REPORT, is_plain=True)
    assert [span.meets for span in found.spans] == [span.meets for span in SPANS]
    assert load_plain(found.payload) == {"loss": [0.5]}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "a", b"b", True, 2**80, float("inf"), 1 + 2j],
        {"a": (1, [2, {"b": {3}}]), 4: None},
        np.float64(0.25),
        np.int64(3),
        [np.float32(0.5), np.bool_(True)],
    ],
)
def test_plain_values_travel(value):
    assert load_plain(dump_plain(value)) == value


def test_tensors_and_arrays_travel():
    weight = torch.arange(6.0).view(2, 3).t()
    value = {"w": nn.Parameter(weight), "i": torch.tensor([1, 2]), "n": np.arange(3.0)}
    found = load_plain(dump_plain(value))
    assert torch.equal(found["w"], weight)
    assert torch.equal(found["i"], value["i"])
    assert np.array_equal(found["n"], value["n"])
    assert torch.equal(load_plain(dump_plain((weight * 2.0).requires_grad_() * 1)), weight * 2)


def test_other_classes_are_named_with_their_place():
    with pytest.raises(
        UnpicklableError, match=r"value\['a'\]\[1\] \(test_plain_reports.Mine\) is"
    ):
        dump_plain({"a": [1, Mine(2)]})
    with pytest.raises(UnpicklableError, match=r"value \(builtins.function\)"):
        dump_plain(test_tensors_and_arrays_travel)


def test_a_class_that_the_program_allows_travels():
    with torch.serialization.safe_globals([Mine]):
        assert load_plain(dump_plain([Mine(3)])) == [Mine(3)]


def test_what_training_returns_is_allowed():
    from labkit.training.loop import RankReport

    report = RankReport([{"loss": 0.5}], 1, 2, "ab", {"w": torch.ones(2)}, {}, REPORT.peak_memory)
    found = load_plain(dump_plain(report))
    assert torch.equal(found.state["w"], torch.ones(2))
    assert found.peak_memory == REPORT.peak_memory


def test_a_pickle_of_a_stranger_is_not_executed(tmp_path):
    path = tmp_path / "proof"
    for data in (pickle.dumps(Bomb(str(path)), protocol=2), bytes(torch_saved(Bomb(str(path))))):
        with pytest.raises(Exception, match=r"(?i)unsupported|weights|load"):
            load_plain(data)
    assert not path.exists()
    load_anyway = torch.load(tmp_file(tmp_path, Bomb(str(path))), weights_only=False)
    assert load_anyway is None
    assert path.exists()


def torch_saved(value) -> bytes:
    import io

    with io.BytesIO() as file:
        torch.save(value, file)
        return file.getvalue()


def tmp_file(folder, value):
    path = folder / "saved"
    path.write_bytes(torch_saved(value))
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0},
        {"kind": "raised"},
        {"messages": "3"},
        {"duration_s": None},
        {"device": 3},
        {"spans": [[1, "compute"]]},
        {"spans": [[1, 2, 0.0, 1.0, 0, None, 0, []]]},
        {"spans": 7},
        {"peak_memory": {"process_bytes": 3}},
        {"surprise": 1},
    ],
)
def test_a_report_that_labkit_does_not_write_is_refused(change):
    data = to_bytes(REPORT)
    (length,) = struct.unpack_from("!Q", data)
    head = json.dumps(json.loads(data[8 : 8 + length]) | change).encode()
    with pytest.raises(ConnectionError, match="the report of rank 1 is not one that labkit"):
        from_bytes(struct.pack("!Q", len(head)) + head + data[8 + length :], 1)


@pytest.mark.parametrize(
    "data", [b"", b"x" * 9, struct.pack("!Q", 2**63) + b"{}", pickle.dumps(3)]
)
def test_other_bytes_are_refused(data):
    with pytest.raises(ConnectionError, match="the report of rank 0 is not one that labkit"):
        from_bytes(data, 0)


class TestVerdict:
    VERDICT = Verdict("DeadlockError", "a\n  b", 3, "here", True)

    def test_it_arrives_as_it_was(self):
        assert Verdict.from_bytes(self.VERDICT.to_bytes(), 4) == self.VERDICT
        error = self.VERDICT.error()
        assert (type(error).__name__, str(error), error.rank, error.is_told) == (
            "DeadlockError",
            "a\n  b",
            3,
            True,
        )

    def test_a_long_one_is_cut(self):
        long = replace(self.VERDICT, text="\u00e4" * 50_000)
        assert len(long.to_bytes()) <= MOST_BYTES
        assert Verdict.from_bytes(long.to_bytes(), 4).text.endswith("... (cut)")

    @pytest.mark.parametrize(
        "change",
        [
            {"kind": "SystemExit"},
            {"text": 3},
            {"rank": 4},
            {"rank": True},
            {"rank": "1"},
            {"is_raised": 1},
            {"more": 1},
        ],
    )
    def test_another_is_refused(self, change):
        data = json.dumps(json.loads(self.VERDICT.to_bytes()) | change).encode()
        with pytest.raises(ValueError, match="of a verdict"):
            Verdict.from_bytes(data, 4)

    def test_control_characters_become_blanks(self):
        bad = replace(self.VERDICT, text="a\x1b[31m\nb")
        assert Verdict.from_bytes(bad.to_bytes(), 4).text == "a [31m\nb"

    def test_hosts_are_named_once_for_each_rank(self):
        text = "rank 0 waits for rank 3. Rank 3 was there.\n\nTraceback of rank 1:\n  rank 1"
        said = with_hosts(text, [(0, 1), (2, 3)], {0: "a", 1: "b"})
        assert said == (
            "rank 0 (host 0) waits for rank 3 (host 1). Rank 3 was there."
            "\nHosts: host 0 is a, host 1 is b.\n\nTraceback of rank 1:\n  rank 1"
        )
        assert with_hosts(text, [(0, 1, 2, 3)], {0: "a"}) == text
