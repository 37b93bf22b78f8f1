"""Profiles of PyTorch's profiler (``export_chrome_trace``), one file per rank, as spans.

With events of a GPU, kernels of collectives and gloo's on the host are communication, and all
other kernels and copies are computing; without, collectives are communication and the other
operators computing. While nothing else happens and the host is in a data loader, the rank waits
for input. A ``ProfilerStep`` begins a unit of work. A rank counts from the first span of all to
its last, or from when its recording began.

Collectives of the ranks of one process group that overlap in time are one: until the last rank has
begun it, the others wait for that rank. Kernels that name no group are taken to be of all ranks;
in a run with several groups they are not compared, nor are sends and receives ever. The files of
several machines are only as exact as their clocks.

Source: Kineto's ``output_json.cpp``; PyTorch's ``ParamCommsUtils.hpp`` for the arguments.
"""

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from labkit.engine.tracing.load import LAUNCH
from labkit.engine.tracing.spans import Span

# Kineto before PyTorch 1.12 wrote other names.
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_ON_HOST = {"cpu_op", "user_annotation", "operator"}
_WORDS = r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
# NCCL (also its symmetric kernels) and RCCL, MSCCL, NVSHMEM, PyTorch's symmetric memory, the
# all-reduces of vLLM, SGLang and AMD, DeepEP, and copies between GPUs.
_KERNEL = re.compile(
    rf"{_WORDS}|\b(?:nccl|rccl|msccl|nvshmem|rocshmem)|cross_device_reduce|quick_?reduce|multimem"
    r"|deep_ep::(?!layout)|\b(?:barrier|put_signal|wait_signal)\w*_kernel|Memcpy PtoP",
    re.IGNORECASE,
)
# Inductor names its own computing by all operators around it, collectives too.
_COMPILED = re.compile(r"^triton_\w*fused_")
# The backend's own event, and calls that lead to one.
_BACKEND = re.compile(
    rf"^[\w-]+:(?!:)(?:\w*(?:{_WORDS}|reduce|gather|scatter|broadcast|barrier)|send|recv)"
)
_CALL = re.compile(
    rf"^(?:c10d|_c10d_functional\w*|symm_mem)::|^record_param_comms|^vllm::(?:{_WORDS})"
)
_NCCL = re.compile(r"^(?:nccl|rccl|xccl)[\w-]*:")
# Of a send or recv nothing names the peer; to these collectives ranks may bring different sizes.
_PEER_TO_PEER = re.compile(r"\b(?:send|recv)\b")
_UNEVEN = re.compile(r"all_?to_?all|:(?:gather|scatter)\b")
# From this share of its seconds on, communication that is not compared is mentioned.
_MENTIONED = 0.1
_LOADER = "enumerate(DataLoader)#"
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)")

# A collective as all its ranks name it: its group, the group's ranks, if known, and its name.
_Key = tuple[str | None, str, str]


@dataclass
class Profile:
    """One rank's profile: its spans, and by number of the span the collectives that can meet."""

    path: Path
    rank: int
    world_size: int = 0
    spans: list[Span] = field(default_factory=list)
    calls: dict[int, _Key] = field(default_factory=dict)
    num_groups: int = 1
    begun_s: float = float("-inf")
    on_gpu: bool = False

    @property
    def start_s(self) -> float:
        return min(span.start_s for span in self.spans)

    @property
    def end_s(self) -> float:
        return max(span.end_s for span in self.spans)

    def add(self, kind: str, start_s: float, end_s: float, lane: int = 0) -> None:
        self.spans.append(Span(self.rank, kind, start_s, end_s, lane=lane))

    def add_backend_event(self, event: dict[str, Any]) -> None:
        """Add a collective that the host carries out, or starts."""
        sizes = (event.get("args") or {}).get("Input Dims")
        if _UNEVEN.search(event["name"]):
            sizes = None
        self.add_collective(event, (None, "", f"{event['name']} {sizes}"))

    def add_collective(self, event: dict[str, Any], key: _Key | None) -> None:
        """Add a collective; without a key it is a call that leads to one."""
        if key:
            self.calls[len(self.spans)] = key
        self.add("communicate", event["start_s"], event["end_s"], lane=1)


def read_profiles(contents: dict[Path, Any]) -> tuple[list[Profile], list[str]]:
    """Return a profile per rank, and what a reader has to know besides.

    Raises:
        ValueError: a file is no profile, is another one of the same rank, or cannot show what
            limited its rank.
    """
    by_rank: dict[int, Profile] = {}
    notes = []
    empty = []
    base_ns = None
    for path, content in contents.items():
        head = content if isinstance(content, dict) else {"traceEvents": content}
        try:
            file_base_ns = int(head.get("baseTimeNanoseconds") or 0)
            base_ns = file_base_ns if base_ns is None else base_ns
            profile = _read_profile(path, head, len(by_rank), (file_base_ns - base_ns) / 1e9)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"cannot read {path} as a Chrome trace: {error!r}") from None
        if all(span.kind == "data" for span in profile.spans):
            empty.append(path)
            continue
        if profile.rank in by_rank:
            other = by_rank[profile.rank].path
            raise ValueError(
                f"{path} and {other} are both of rank {profile.rank}: give one file per rank (of "
                "a schedule with several cycles, those of one cycle)"
            )
        by_rank[profile.rank] = profile
    if not by_rank:
        raise ValueError(f"{empty[0]} has no operators or kernels of PyTorch's profiler")
    profiles = list(by_rank.values())
    world_size = max(profile.world_size for profile in profiles)
    spans = itertools.chain.from_iterable(profile.spans for profile in profiles)
    communicates = any(span.kind == "communicate" for span in spans)
    if communicates and (world_size or 2) > len(profiles):
        notes.append(
            f"Of {world_size or 'all'} ranks only {len(profiles)} can be seen: waiting for others "
            "counts as communication."
        )
    return profiles, notes


def _read_profile(path: Path, head: dict[str, Any], number: int, later_s: float) -> Profile:
    """Return a rank's profile; its clock begins ``later_s`` after that of the first file.

    The file names its rank, or the file's name does; else it is the file's ``number``.
    """
    about = head.get("distributedInfo") or {}
    match = _RANK_IN_NAME.search(path.name)
    rank = about.get("rank")
    if rank is None:
        rank = match[1] if match else number
    profile = Profile(path, int(rank), int(about.get("world_size") or 0))
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in head["traceEvents"]:
        if event and event["ph"] == "X" and "dur" in event:
            event["start_s"] = float(event["ts"]) / 1e6 + later_s
            event["end_s"] = event["start_s"] + float(event["dur"]) / 1e6
            events[str(event.get("cat")).lower()].append(event)
    recording = [e for e in events["trace"] if e["name"].startswith("PyTorch Profiler")]
    if recording:
        profile.begun_s = recording[0]["start_s"]
    on_gpu = list(itertools.chain.from_iterable(events[category] for category in _ON_GPU))
    on_host = list(itertools.chain.from_iterable(events[category] for category in _ON_HOST))
    if len(recording) > 1 or len({event["pid"] for event in on_host}) > 1:
        raise ValueError(
            f"{path} holds several recordings, merged into one: give the files from which it was "
            "made, one per rank"
        )
    # A host only starts NCCL's collectives, unless it is seen to stand in them.
    nccl_s = [e["end_s"] - e["start_s"] for e in on_host if _NCCL.match(e["name"])]
    only_starts = False
    if nccl_s:
        host_s = max(e["end_s"] for e in on_host) - min(e["start_s"] for e in on_host)
        only_starts = sum(nccl_s) < host_s / 2
    if on_gpu:
        profile.on_gpu = True
        _add_kernels(profile, on_gpu)
        for event in on_host:
            if event["name"].startswith("gloo:"):
                profile.add_backend_event(event)
    elif LAUNCH in head["traceEvents"] or only_starts:
        raise ValueError(
            f"{path} has no events of a GPU, though its program ran on one or on another device, "
            "and what limited it cannot be seen on the host: profile with ProfilerActivity.CUDA"
        )
    else:
        _add_operators(profile, on_host)
    for event in on_host:
        if event["name"].startswith(_LOADER):
            profile.add("input", event["start_s"], event["end_s"])
        elif event["name"].startswith("ProfilerStep"):
            profile.add("data", event["start_s"], event["start_s"])
    groups = {str(g.get("ranks")) for g in about.get("pg_config") or [] if g.get("pg_size") != 1}
    profile.num_groups = len(groups)
    return profile


@cache
def _communicates(kernel: str) -> bool:
    return bool(_KERNEL.search(kernel)) and not _COMPILED.match(kernel)


def _add_kernels(profile: Profile, events: list[dict[str, Any]]) -> None:
    """Add the kernels and copies of a rank's GPU; computing on several streams is one span."""
    end_s = float("-inf")
    for event in sorted(events, key=lambda event: event["start_s"]):
        name = event["name"]
        if _communicates(name):
            about = event.get("args") or {}
            group = about.get("Process Group Name")
            members = str(about.get("Process Group Ranks", ""))
            collective = about.get("Collective name", re.split(r"[(<]", name)[0])
            if "..." in members:
                members = ""  # a long list, of which the profiler has left out ranks
            profile.add_collective(event, (group, members, str(collective)))
        elif event["end_s"] > end_s:
            profile.add("compute", max(event["start_s"], end_s), event["end_s"])
            end_s = event["end_s"]


def _add_operators(profile: Profile, events: list[dict[str, Any]]) -> None:
    """Add a host's operators: in each thread the innermost one counts, of a loader the loader."""
    by_thread = defaultdict(list)
    for event in events:
        name = event["name"]
        event["kind"] = "compute"
        if _BACKEND.match(name):
            profile.add_backend_event(event)
            event["kind"] = "communicate"
        elif _CALL.match(name):
            profile.add_collective(event, None)
            event["kind"] = "communicate"
        elif name.startswith(_LOADER):
            event["kind"] = "input"
        elif event["cat"] == "user_annotation" or name.startswith("ProfilerStep"):
            continue
        if event["end_s"] > event["start_s"]:
            by_thread[event["pid"], event["tid"]].append(event)
    for lane, thread in enumerate(by_thread.values(), 2):
        changes = []
        for event in thread:
            changes.append((event["end_s"], -1, -event["start_s"], event))
            changes.append((event["start_s"], 1, -event["end_s"], event))
        changes.sort(key=itemgetter(0, 1, 2))
        active: list[dict[str, Any]] = []
        since_s = 0.0
        for at_s, step, _, event in changes:
            computes = active and active[-1]["kind"] == "compute"
            if computes and at_s > since_s and all(a["kind"] != "input" for a in active):
                profile.add("compute", since_s, at_s, lane)
            since_s = at_s
            if step > 0:
                active.append(event)
            else:
                active.remove(event)


def join(profiles: Sequence[Profile]) -> list[list[Span]]:
    """Return the spans of each rank, with what meets in them.

    Raises:
        ValueError: the files are of different runs, or of different times of one.
    """
    sizes = {profile.world_size: profile.path for profile in profiles if profile.world_size}
    if len(sizes) > 1:
        listed = ", ".join(f"{path} is of {size} ranks" for size, path in sizes.items())
        raise ValueError(f"{listed}: give the files of one run")
    latest = max(profiles, key=lambda profile: profile.start_s)
    earliest = min(profiles, key=lambda profile: profile.end_s)
    if len(profiles) > 1 and latest.start_s >= earliest.end_s:
        raise ValueError(
            f"{latest.path} begins {latest.start_s - earliest.end_s:.3g} s after {earliest.path} "
            "has ended: give files that were recorded at the same time"
        )
    first_s = min(profile.start_s for profile in profiles)
    for profile in profiles:
        # A rank that does nothing at first has begun nevertheless.
        begun_s = max(first_s, profile.begun_s)
        if begun_s < profile.start_s:
            profile.add("input", begun_s, begun_s)
    by_rank = {profile.rank: profile for profile in profiles}
    calls: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, profile in by_rank.items():
        for index in sorted(profile.calls, key=lambda index: profile.spans[index].start_s):
            key = profile.calls[index]
            is_known = key[0] is not None or profile.num_groups <= 1
            if is_known and not _PEER_TO_PEER.search(key[2]):
                calls[key][rank].append(index)
    number = 0
    for (_, members, _), calls_of in calls.items():
        group = set(map(int, re.findall(r"\d+", members))) if members else set(by_rank)
        present = group & by_rank.keys()
        if len(present) > 1 and present <= calls_of.keys():
            for together in _overlapping({rank: calls_of[rank] for rank in present}, by_rank):
                number += 1
                for rank, index in together.items():
                    spans = by_rank[rank].spans
                    spans[index] = replace(spans[index], meets=((-1, -1, number),))
    return [profile.spans for profile in profiles]


def uncompared(profiles: Sequence[Profile]) -> str:
    """Say for how much of the communication of joined profiles nothing shows who waits."""
    all_s = 0.0
    uncompared_s = 0.0
    for profile in profiles:
        for index in profile.calls:
            span = profile.spans[index]
            all_s += span.duration_s
            if not span.meets:
                uncompared_s += span.duration_s
    if len(profiles) == 1 or uncompared_s <= _MENTIONED * all_s:
        return ""
    return (
        f"For {uncompared_s / all_s:.0%} of the seconds in sends, receives and collectives these "
        "profiles do not show which ranks met: waiting there counts as communication, also where "
        "computing hides it."
    )


def _overlapping(
    calls: dict[int, list[int]], by_rank: dict[int, Profile]
) -> Iterator[dict[int, int]]:
    """Yield the collectives that all ranks are in at one moment: by rank the span's index."""
    waiting = {rank: deque(indexes) for rank, indexes in calls.items()}
    while all(waiting.values()):
        heads = {rank: indexes[0] for rank, indexes in waiting.items()}
        spans = {rank: by_rank[rank].spans[index] for rank, index in heads.items()}
        first_to_end = min(spans, key=lambda rank: spans[rank].end_s)
        if max(span.start_s for span in spans.values()) < spans[first_to_end].end_s:
            yield heads
            for indexes in waiting.values():
                indexes.popleft()
        else:
            # It was over before another rank's began: its own meeting was not recorded there.
            waiting[first_to_end].popleft()
