"""Other people's profiles and dumps: what labkit explain says, against arithmetic."""

import gzip
import json
import pickle

import pytest
import torch
import torch.distributed as dist

from labkit import run
from labkit.engine.tracing.chrome import read_traces
from labkit.engine.tracing.explain import explain
from labkit.engine.tracing.limits import what_limited

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(name, start_ms, ms, category="kernel", thread=7, **arguments):
    """A complete event as Kineto writes it, in microseconds."""
    times = {"ts": 1e3 * start_ms, "dur": 1e3 * ms}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times} | {
        "args": arguments
    }


def collective(start_ms, ms, group, ranks):
    names = {"Collective name": "allreduce", "Process Group Name": group}
    names["Process Group Ranks"] = str(ranks)
    return event(NCCL, start_ms, ms, thread=20, **names)


def profile(folder, rank, events, world_size=2, **head):
    about = {"backend": "nccl", "rank": rank, "world_size": world_size}
    path = folder / f"host_{rank}.17.pt.trace.json.gz"
    content = {"schemaVersion": 1, "distributedInfo": about, "traceEvents": events, **head}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def limit_of(*paths):
    trace, gap = read_traces(paths)
    return what_limited(trace, gap=gap)


@pytest.mark.parametrize(
    "name",
    [
        NCCL,
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
        "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)",
        "ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)",
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "void mscclKernel_Sum_float_Simple_false(ncclDevComm*)",
        "void (anonymous namespace)::multimem_one_shot_reduce_kernel<c10::BFloat16, 16>(int)",
        "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(int)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "void quickreduce::allreduce_prototype_twoshot<quickreduce::CodecQ4>(half const*)",
        "void tensorrt_llm::kernels::allreduce_fusion_kernel_oneshot_lamport<8>(int)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
        "nvshmemi_proxy_quiet_entrypoint()",
    ],
)
def test_kernels_of_collectives_are_communication(name, tmp_path):
    events = [event("gemm", 20 * n, 2) for n in range(3)]
    events += [event(name, 20 * n + 2, 18) for n in range(3)]
    limit = limit_of(profile(tmp_path, 0, events, world_size=1))
    assert limit.kind == "communication"
    assert limit.shares["communicate"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
        "triton_poi_fused_add_all_gather_into_tensor_wait_tensor_3",
        "void deep_ep::layout::get_dispatch_layout<256, 8>(long const*)",
    ],
)
def test_kernels_that_only_sound_like_it_are_computing(name, tmp_path):
    assert limit_of(profile(tmp_path, 0, [event(name, 0, 5)])).shares["compute"] == 1


@pytest.mark.parametrize("categories", [("kernel", "cpu_op"), ("Kernel", "Operator")])
def test_overlap_input_and_idle_add_up(categories, tmp_path):
    on_gpu, on_host = categories
    events = [
        event("ProfilerStep#1", 0, 100, on_host, 1),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 50, on_host, 1),
        event("aten::stack", 10, 20, on_host, 1),
        event("gemm", 40, 30, on_gpu),
        event(NCCL, 60, 20, on_gpu, 20),
        event("gemm", 90, 10, on_gpu),
    ]
    limit = limit_of(profile(tmp_path, 0, events, world_size=1))
    assert limit.shares == pytest.approx(
        {"compute": 0.4, "communicate": 0.1, "wait": 0, "input": 0.4, "gap": 0.1}
    )
    assert limit.hidden == pytest.approx(0.5)


def test_a_run_that_loads_most_of_the_time_is_limited_by_input(tmp_path):
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    events = [event(loader, 100 * n, 80, "user_annotation", 1) for n in range(3)]
    events += [event("gemm", 100 * n + 80, 20) for n in range(3)]
    limit = limit_of(profile(tmp_path, 0, events, world_size=1))
    assert limit.kind == "input"
    assert limit.shares["input"] == pytest.approx(0.8)


def waits(*paths):
    """By rank, in milliseconds, how long it waited and for whom."""
    trace, _ = read_traces(paths)
    return [(s.rank, s.peer, round(1e3 * s.duration_s, 6)) for s in trace.of(kind="wait")]


def test_ranks_wait_in_collectives_of_one_group_only(tmp_path):
    # Rank 0 calls that of group 1 first, rank 1 that of group 2: by number they would be crossed.
    first = [collective(0, 30, "1", [0, 1]), collective(40, 20, "2", [0, 1])]
    second = [collective(25, 5, "1", [0, 1]), collective(30, 30, "2", [0, 1])]
    alone = [collective(5, 10, "3", [1, 2])]
    # The second file's clock began a second later.
    late = [{**e, "ts": e["ts"] - 1e6} for e in second + alone]
    paths = [
        profile(tmp_path, 0, first, 3, baseTimeNanoseconds=10**18),
        profile(tmp_path, 1, late, 3, baseTimeNanoseconds=10**18 + 10**9),
    ]
    assert waits(*paths) == [(0, 1, 25), (1, 0, 10)]
    assert "Of 3 ranks only 2 can be seen" in explain(paths)


def test_what_does_not_overlap_has_not_met(tmp_path):
    # A sampled pair: rank 1's file lacks the first collective.
    sampled = profile(tmp_path, 0, [event(NCCL, 0, 10), event(NCCL, 50, 10)])
    other = profile(tmp_path, 1, [event("gemm", 5, 1), event(NCCL, 54, 6)])
    assert waits(sampled, other) == [(0, 1, 4)]


def test_the_rank_that_computes_longest_is_named(tmp_path):
    steps = {0: (2, 18), 1: (16, 4)}
    for rank, (compute_ms, reduce_ms) in steps.items():
        events = [event("gemm", 20 * n, compute_ms) for n in range(4)]
        events += [collective(20 * n + compute_ms, reduce_ms, "0", [0, 1]) for n in range(4)]
        profile(tmp_path, rank, events)
    limit = limit_of(tmp_path)
    assert (limit.kind, limit.rank, limit.slowdown) == ("straggler", 1, pytest.approx(8))
    assert limit.shares["wait"] == pytest.approx(0.7 / 2)


def test_without_a_gpu_the_innermost_operator_of_a_thread_counts(tmp_path):
    events = [
        event("Wrapper", 0, 10, "cpu_op", 1),
        event("c10d::alltoall_base_", 2, 5, "cpu_op", 1),
        event("record_param_comms", 2, 5, "cpu_op", 1),
        event("hccl:all_to_all", 2, 5, "user_annotation", 1),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter", 10, 10, "user_annotation", 1),
        event("aten::stack", 12, 6, "cpu_op", 1),
    ]
    shares = limit_of(profile(tmp_path, 0, events)).shares
    assert shares == pytest.approx(
        {"compute": 0.25, "communicate": 0.25, "wait": 0, "input": 0.5, "gap": 0}
    )


def gloo(name, start_ms, ms, size=8, thread=9):
    dims = {"Input Dims": [[size]]}
    return event(f"gloo:{name}", start_ms, ms, "user_annotation", thread, **dims)


@pytest.mark.parametrize("name", ["send", "all_reduce"])
def test_where_no_partner_can_be_seen_waiting_is_not_denied(name, tmp_path):
    # Rank 1 computes longest, and nothing says that rank 0 waits for it.
    two_groups = [{"pg_size": 4, "ranks": [0, 1]}, {"pg_size": 2, "ranks": [0, 2]}]
    for rank, ms in enumerate((10, 80)):
        events = [event("aten::mm", 0, ms, "cpu_op", 1), gloo(name, ms, 100 - ms)]
        about = {"rank": rank, "world_size": 2, "pg_config": two_groups}
        profile(tmp_path, rank, events, distributedInfo=about)
    text = explain([tmp_path])
    assert "For 100% of the seconds" in text
    assert "do not show which ranks met: waiting there counts as communication" in text
    assert "they hardly waited" not in text


def test_a_rank_that_is_late_is_named_though_it_computes_least(tmp_path):
    # Both compute hardly at all, rank 0 more; rank 1 sleeps.
    for rank, (compute_ms, begins_ms) in enumerate([(4, 4), (1, 90)]):
        steps = range(3)
        events = [event("ProfilerStep", 100 * n, 100, "user_annotation", 1) for n in steps]
        events += [event("aten::mm", 100 * n, compute_ms, "cpu_op", 1) for n in steps]
        events += [gloo("all_reduce", 100 * n + begins_ms, 100 - begins_ms) for n in steps]
        profile(tmp_path, rank, events)
    limit = limit_of(tmp_path)
    assert (limit.kind, limit.rank) == ("straggler", 1)
    assert "between its messages" in str(limit)


def test_ranks_meet_in_an_all_to_all_of_different_sizes(tmp_path):
    first = profile(tmp_path, 0, [gloo("all_to_all", 0, 30, size=5)])
    second = profile(tmp_path, 1, [gloo("all_to_all", 20, 10, size=7)])
    assert waits(first, second) == [(0, 1, 20)]


def test_gloos_collectives_count_beside_a_gpu(tmp_path):
    events = [event("gemm", 0, 30), gloo("all_reduce", 20, 80)]
    limit = limit_of(profile(tmp_path, 0, events, world_size=1))
    assert limit.shares["communicate"] == pytest.approx(0.7)
    assert limit.hidden == pytest.approx(1 / 8)


def test_files_that_were_merged_into_one_are_refused(tmp_path):
    started = event("PyTorch Profiler (0)", 0, 10, "Trace", "PyTorch Profiler")
    ranks = [{**event("aten::mm", 0, 9, "cpu_op"), "pid": pid} for pid in (1, 2)]
    cycles = [started, event("aten::mm", 0, 9, "cpu_op"), started]
    for merged in (ranks, cycles):
        with pytest.raises(ValueError, match="several recordings"):
            explain([profile(tmp_path, 0, merged)])


def test_a_profile_of_another_accelerator_is_refused(tmp_path):
    events = [event("aten::mm", 0, 9, "cpu_op"), event("enqueueCommand", 1, 1, "mtia_runtime")]
    with pytest.raises(ValueError, match="no events of a GPU"):
        explain([profile(tmp_path, 0, events)])


def test_a_profile_of_an_empty_step_is_refused(tmp_path):
    # So ends a profile whose schedule records on when the loop is over.
    with pytest.raises(ValueError, match="no operators or kernels"):
        explain([profile(tmp_path, 0, [event("ProfilerStep#10", 0, 1, "user_annotation", 1)])])


def test_a_profilers_table_beside_its_traces_is_passed_over(tmp_path):
    profile(tmp_path, 0, [event("gemm", 0, 5)])
    (tmp_path / "fit-profile-0.txt").write_text("Name  Self CPU %")
    assert "Computing limited the run" in explain([tmp_path])


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    path = profile(tmp_path, 0, [event("gemm", 0, 1)])
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    others = {
        "is of 8 ranks": profile(folders[0], 1, [event("gemm", 0, 1)], world_size=8),
        "after": profile(folders[1], 1, [event("gemm", 9, 1)]),
        "both of rank 0": profile(folders[2], 0, [event("gemm", 0, 1)]).rename(folders[2] / "x"),
        "no events of a GPU": profile(
            folders[3],
            1,
            [event("nccl:all_reduce", 0, 1, "cpu_op"), event("aten::mm", 1, 9, "cpu_op")],
        ),
    }
    for words, other in others.items():
        with pytest.raises(ValueError, match=words):
            explain([path, other])


def entry(number, name="nccl:all_reduce", size=10, **more):
    """An entry of a flight recorder."""
    known = {"collective_seq_id": number, "profiling_name": name, "input_sizes": [[size]]}
    known |= {"process_group": ("0", "default_pg"), "input_dtypes": ["Float"], "is_p2p": False}
    return known | {"state": "scheduled", "retired": False} | more


def dumped(folder, *ranks, pickled=True):
    paths = []
    for rank, entries in enumerate(ranks):
        dump = {"version": "2.10", "entries": entries, "pg_config": {}}
        paths.append(folder / f"trace_{rank}")
        text = json.dumps(dump).encode()
        paths[-1].write_bytes(pickle.dumps(dump, protocol=2) if pickled else text)
    return paths


@pytest.mark.parametrize("pickled", [True, False])
def test_flight_recorders_show_who_is_behind_and_what_differs(pickled, tmp_path):
    behind = dumped(
        tmp_path, [entry(1), entry(2)], [entry(1)], [entry(1), entry(2)], pickled=pickled
    )
    assert explain(behind) == (
        "In collective 2 of group 0, nccl:all_reduce of [[10]] Float: ranks 0 and 2. "
        "Not yet there: rank 1, after 1."
    )
    sizes = dumped(tmp_path, [entry(1), entry(2)], [entry(1), entry(2, size=20)], pickled=pickled)
    assert "Collective 2 of group 0 does not match" in explain(sizes)
    uneven = [entry(1, "nccl:all_to_all", size, retired=True) for size in (10, 20)]
    assert "Nothing stands still" in explain(dumped(tmp_path, *[[e] for e in uneven]))
    assert "only the dumps of the other ranks" in explain(dumped(tmp_path, [entry(1)]))


class Touch:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_read_without_running_anything(tmp_path):
    path, touched = tmp_path / "trace_0", tmp_path / "touched"
    path.write_bytes(pickle.dumps({"entries": [Touch(touched)]}))
    with pytest.raises(ValueError, match="only plain data"):
        explain([path])
    assert not touched.exists()


def test_pages_of_the_debug_server_are_read(tmp_path):
    page = tmp_path / "page.html"
    bodies = [json.dumps({"entries": [entry(n) for n in range(1, last)]}) for last in (4, 3)]
    each = [
        f"<h2>Rank {rank}: http://h/</h2><pre>{body}</pre>" for rank, body in enumerate(bodies)
    ]
    page.write_text("".join([*each, "<h2>Rank 2: http://h/</h2><pre>Timeout</pre>"]))
    assert "Not yet there: rank 1, after 2. No answer came from rank 2." in explain([page])
    page.write_text("=== Rank 0: http://h ===\nThread 1 (most recent call first):\n")
    with pytest.raises(ValueError, match="stacks alone do not"):
        explain([page])


def test_torchtitans_logs_show_the_phases_of_steps(tmp_path):
    for rank in range(2):
        times = [("step", 0, 100), ("fetching_batch", 5, 65), ("fwd_bwd", 66, 100)]
        records = [(us, f"{name}_start") for name, us, _ in times]
        records += [(us, f"{name}_end") for name, _, us in reversed(times)]
        lines = [
            json.dumps({"rank": rank, "log_type": "event", "log_type_name": name, "time_us": us})
            for us, name in sorted(records, key=lambda record: record[0])
        ]
        (tmp_path / f"training.global_rank_{rank}.jsonl").write_text("\n".join([*lines, '{"rank']))
    assert explain([tmp_path]) == (
        "Input limited the run: fetching_batch took 60% of the time in steps. "
        "The rest: fwd_bwd 34%, code between the phases 6%."
    )


def test_torchtitans_logs_of_two_runs_are_refused(tmp_path):
    for rank, begins_us in enumerate((0, 500)):
        lines = []
        for name, us in {"step_start": begins_us, "step_end": begins_us + 100}.items():
            lines.append(json.dumps({"rank": rank, "log_type_name": name, "time_us": us}) + "\n")
        (tmp_path / f"training.global_rank_{rank}.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match="give the logs of one run"):
        explain([tmp_path])


def profiled(comm, folder):
    """Three steps with an all-reduce, of which rank 1 comes late."""
    import time

    with torch.profiler.profile(record_shapes=True, with_stack=True) as recorded:
        for _ in range(3):
            time.sleep(0.3 * (comm.rank == 1))
            dist.all_reduce(torch.ones(1000))
    recorded.export_chrome_trace(f"{folder}/rank{comm.rank}.json.gz")


def test_profiles_of_this_pytorch_name_the_rank_that_comes_late(tmp_path):
    # Of three: on a busy machine the seconds of one that waits and one that is late are alike.
    run(profiled, str(tmp_path), world_size=3, device="cpu", transport="gloo")
    trace, _ = read_traces([tmp_path])
    waited_s = sum(span.duration_s for span in trace.of(rank=0, kind="wait"))
    assert waited_s == pytest.approx(0.9, rel=0.3)
    assert "Rank 1 limited the run" in explain([tmp_path])
