"""Reading Chrome traces: what comes back, and that whatever cannot be read ends in one line."""

import gzip
import json

import pytest

from labkit.__main__ import main
from labkit.engine.tracing import Span, Trace
from labkit.engine.tracing.chrome import read_traces


def written(folder, events):
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def event(name, ts, dur, cat="cpu_op", **more):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 7, "tid": 1, **more}


def test_a_saved_trace_comes_back(tmp_path):
    spans = (
        Span(0, "compute", 0.0, 0.25),
        Span(1, "wait", 0.125, 0.25, 0, 0),
        Span(1, "share_reduce", 0.25, 0.5, 4096, 0, 2, (), ((1, 0, 3),), (5, 0.125)),
    )
    about = {"strategy": "ddp", "batch_size": 64}
    path = Trace(spans, {0: "cuda:0"}, about=about).save(tmp_path / "t.json")
    named = [e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"][:2]]
    assert named == ["rank 0 · cuda:0", "rank 1"]
    trace, _ = read_traces([path])
    assert trace == Trace(spans, about=about)
    assert (trace.spans[2].messages, trace.spans[2].call) == (spans[2].messages, spans[2].call)
    path.write_text(json.dumps(json.loads(path.read_text())["traceEvents"]))
    assert read_traces([path])[0] == Trace(spans)


def test_on_a_gpu_kernels_count_and_their_launches_do_not(tmp_path):
    path = written(
        tmp_path,
        [
            event("aten::mm", 0, 50),
            event("cudaLaunchKernel", 0, 50, "cuda_runtime"),
            event("nccl:all_reduce", 0, 3, "user_annotation"),
            event("volta_sgemm_128x64", 60, 5, "kernel", pid=0, tid=7),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 62, 9, "kernel", pid=0, tid=20),
            event("Memcpy HtoD", 72, 1, "gpu_memcpy", pid=0, tid=7),
        ],
    )
    trace, gap = read_traces([path])
    assert [span.kind for span in trace.spans] == ["compute", "communicate", "compute"]
    assert gap == "a GPU without work"


GOOD = json.dumps({"traceEvents": [event("aten::mm", 1, 2)]})
BROKEN = {
    "no text": b"\xff\xfe\x00",
    "cut off": GOOD[:-9].encode(),
    "packed and cut off": gzip.compress(GOOD.encode())[:-9],
    "a number": b"7",
    "no events": b'{"traceEvents": []}',
    "empty": b"",
    "of nothing": b"{}",
    "another tool's": b'[{"ph": "X", "ts": 1, "dur": 2}]',
    "absent": None,
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_trace_is_refused_in_one_line(case, tmp_path, capsys):
    path = tmp_path / "trace.json"
    if BROKEN[case] is not None:
        path.write_bytes(BROKEN[case])
    for words in ([], ["--link", "1ms"]):
        with pytest.raises(SystemExit, match="2"):
            main(["explain", str(path), *words])
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(path) in error
        assert "TypeError" not in error
        assert "KeyError(" not in error
