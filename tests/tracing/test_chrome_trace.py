"""Reading Chrome traces: what comes back, and that whatever cannot be read ends in one line."""

import gzip
import json
from pathlib import Path

import pytest

from labkit.__main__ import main
from labkit.tracing import Span, Trace, chrome as chrome_trace
from labkit.tracing.chrome import read_traces

RECORDED = Path(__file__).parent / "recorded"


def written(folder, events, name="trace.json", **head):
    path = folder / name
    path.write_text(json.dumps({"traceEvents": events, **head}))
    return path


def event(name, ts, dur, cat="cpu_op", **more):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 7, "tid": 1, **more}


def of_rank(folder, rank, events, world_size=2, **head):
    note = {"rank": rank, "world_size": world_size}
    return written(folder, events, f"rank{rank}.json", distributedInfo=note, **head)


def test_a_saved_trace_comes_back(tmp_path):
    spans = (
        Span(0, "compute", 0.0, 0.25),
        Span(1, "wait", 0.125, 0.25, 0, 0),
        Span(1, "share_reduce", 0.25, 0.5, 4096, 0, 2),
    )
    assert read_traces([Trace(spans).save(tmp_path / "t.json")]).trace == Trace(spans)


def test_devices_are_in_the_names_of_the_processes_and_come_back(tmp_path):
    spans = tuple(Span(rank, "compute", 0.0, 0.25) for rank in range(4))
    devices = {0: "cuda:0", 1: "cuda:0", 2: "cpu", 3: "cuda:1 of machine 1"}
    path = Trace(spans, devices).save(tmp_path / "t.json")
    named = [e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"][:4]]
    assert named[:3] == ["rank 0 · cuda:0", "rank 1 · cuda:0", "rank 2 · cpu"]
    assert read_traces([path]).trace == Trace(spans, devices)
    assert hash(Trace(spans, devices)) == hash(Trace(spans, devices))


def test_the_command_names_the_gpu_of_the_rank_that_limited_the_run(tmp_path, capsys):
    read = read_traces([RECORDED / "straggler.json.gz"]).trace
    alone = main(["explain", str(read.save(tmp_path / "cpu.json"))]), capsys.readouterr().out
    devices = dict.fromkeys(read.ranks, "cuda:0")
    path = Trace(read.spans, devices).save(tmp_path / "gpu.json")
    assert main(["explain", str(path)]) == 0
    told = capsys.readouterr().out
    others = ", ".join(str(rank) for rank in read.ranks if rank != 1)
    noun = "ranks" if len(read.ranks) > 2 else "rank"
    assert told.startswith(alone[1].strip())
    assert f"Rank 1 is on cuda:0, which it shares with {noun} {others}." in told


def test_operators_and_collectives_of_a_cpu_profile(tmp_path):
    path = written(
        tmp_path,
        [
            event("aten::mm", 10, 5),
            event("gloo:all_reduce", 12, 6, "user_annotation", tid=2),
            event("Optimizer.step", 10, 9, "user_annotation"),
            event("ProfilerStep#3", 10, 20, "user_annotation"),
            {"ph": "s", "name": "fwdbwd"},
            "not an event",
        ],
        baseTimeNanoseconds=10**18,
    )
    trace = read_traces([path]).trace
    kinds = {(span.kind, span.lane) for span in trace.spans}
    assert kinds == {("compute", 0), ("communicate", 1), ("data", 0)}
    assert trace.of(kind="communicate")[0].start_s == pytest.approx(2e-6, abs=1e-7)


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
    read = read_traces([path])
    assert [span.kind for span in read.trace.spans] == ["compute", "communicate", "compute"]
    assert read.gap == "a GPU without work"


def test_until_the_last_rank_has_begun_a_collective_the_others_wait(tmp_path):
    early = of_rank(tmp_path, 0, [event("gloo:all_reduce", 10, 30, "user_annotation")])
    late = of_rank(tmp_path, 1, [event("gloo:all_reduce", 30, 10, "user_annotation")])
    trace = read_traces([late, early]).trace
    (wait,) = trace.of(kind="wait")
    assert (wait.rank, wait.peer, wait.duration_s) == (0, 1, pytest.approx(20e-6))
    assert [span.rank for span in trace.of(kind="communicate")] == [0, 1]


def test_collectives_that_do_not_match_are_left_as_they_are(tmp_path):
    call = event("gloo:all_reduce", 10, 30, "user_annotation")
    paths = [of_rank(tmp_path, 0, [call, call | {"ts": 50}]), of_rank(tmp_path, 1, [call])]
    assert not read_traces(paths).trace.of(kind="wait")


def test_the_command_says_what_limited_the_run(capsys):
    assert main(["explain", str(RECORDED / "straggler.json.gz")]) == 0
    assert capsys.readouterr().out.startswith("Rank 1 limited the run: it took ")


def test_the_command_says_which_ranks_are_missing(capsys):
    assert main(["explain", str(RECORDED / "profiler_rank0.json.gz")]) == 0
    assert "The files have 1 rank of 2: waiting" in capsys.readouterr().out


GOOD = json.dumps({"traceEvents": [event("aten::mm", 1, 2)]})
BROKEN = {
    "empty": (b"", "its JSON is broken, or cut off"),
    "a program": (b"import os", "its JSON is broken, or cut off"),
    "no text": (b"\xff\xfe\x00", "its JSON is broken, or cut off"),
    "cut off": (GOOD[:-9].encode(), "its JSON is broken, or cut off"),
    "packed and cut off": (gzip.compress(GOOD.encode())[:-9], "cannot read"),
    "packed and damaged": (b"\x1f\x8b" + bytes(30), "cannot read"),
    "deep": (b"[" * 100_000, "its JSON is broken, or cut off"),
    "a number": (b"7", "has no list of traceEvents"),
    "no list": (b'{"traceEvents": {}}', "has no list of traceEvents"),
    "no events": (b'{"traceEvents": []}', "has no spans of labkit or of PyTorch's profiler"),
    "another tool's": (b'[{"ph": "X", "ts": 1, "dur": 2}]', "has no spans of labkit"),
    "a time in words": (GOOD.replace("2", '"two"').encode(), "has dur 'two', not a number"),
    "no start": (GOOD.replace('"ts": 1, ', "").encode(), "has ts 'None', not a number"),
    "not a number": (GOOD.replace("2", "NaN").encode(), "has dur 'nan', not a number"),
    "ends before it begins": (GOOD.replace("2", "-2").encode(), "has dur '-2', not a number"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_trace_is_refused_in_one_line(case, tmp_path, capsys):
    content, message = BROKEN[case]
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        main(["explain", str(path)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error
    assert message in error


def test_files_that_are_not_there(tmp_path, capsys):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(SystemExit, match="2"):
            main(["explain", str(path)])
        assert f"cannot read {path}: " in capsys.readouterr().err


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome_trace, "MOST_BYTES", 1000)
    for name, data in (("a", b" " * 2000), ("b", gzip.compress(b" " * 2000))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="holds more than 1,000 B of JSON"):
            read_traces([tmp_path / name])


def test_files_that_do_not_belong_together(tmp_path):
    ours = Trace((Span(0, "compute", 0.0, 1.0),)).save(tmp_path / "ours.json")
    one = of_rank(tmp_path, 0, [event("aten::mm", 1, 2)])
    with pytest.raises(ValueError, match="is a trace of labkit's, which has all ranks"):
        read_traces([one, ours])
    (tmp_path / "again.json").write_text(one.read_text())
    with pytest.raises(ValueError, match="is the trace of rank 0, as is a file before it"):
        read_traces([one, tmp_path / "again.json"])
