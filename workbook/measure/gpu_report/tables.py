"""The tables of a report's page: what was measured here, beside the CPU records.

A cell is a text, or a ``Number``, whose value is the one in the JSON; a table has heads and rows.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from labkit.units import format_bytes, format_number, format_seconds
from workbook.measure.compare import summary

Record: TypeAlias = Mapping[str, Any]


class Number(NamedTuple):
    """A number of the JSON, and how the page shows it."""

    value: float
    text: str


Cell: TypeAlias = "str | Number"


@dataclass(frozen=True)
class Table:
    """A table with its title and the sentence below it."""

    title: str
    heads: list[str]
    rows: list[list[Cell]]
    note: str = ""


def seconds(value: float) -> Number:
    return Number(value, format_seconds(value))


def gigabytes_per_s(value: float) -> Number:
    return Number(value, format_number(value / 1e9))


def share(value: float) -> Number:
    return Number(value, f"{value:.1%}")


# What a bench's record says, by what it is: the median of the seconds.
Medians: TypeAlias = dict[tuple[Hashable, ...], float]


def _all_reduce(record: Record) -> Medians:
    rows = record.get("rows", [])
    return {
        (row["world_size"], row["size_bytes"], row["contender"]): row["time_s"]["median"]
        for row in rows
    }


def _ddp(record: Record) -> Medians:
    rows = record.get("rows", [])
    return {
        (row["model"], row["world_size"], row["backend"]): row["step_s"]["median"] for row in rows
    }


def _pipeline(record: Record) -> Medians:
    rows = record.get("rows", [])
    return {
        (row["model"], row["world_size"], row["contender"]): row["step_s"]["median"]
        for row in rows
    }


def _launch(record: Record) -> Medians:
    ways = {"labkit.run": "ours_s", "torch.multiprocessing.spawn": "other_s"}
    return {
        (row["world_size"], name): statistics.median(row[field])
        for row in record.get("comparisons", [])
        for name, field in ways.items()
    }


def _placement(record: Record) -> Medians:
    names = ("placement", "cut", "direction", "batch_size", "trained")
    return {
        tuple(row[name] for name in names): statistics.median(row["seconds"])
        for row in record.get("hops", [])
    }


def _compare(record: Record) -> Medians:
    found: Medians = {}
    for contender in record.get("contenders", []):
        name = contender["name"]
        for world_size, times in summary.series(dict(record), name, "world_size").items():
            if times:
                found[name, world_size] = statistics.median(times)
    return found


class Bench(NamedTuple):
    """How a bench's record becomes a table: the heads of its keys, its reader, its CPU record."""

    heads: list[str]
    medians: Callable[[Record], Medians]
    cpu_file: str
    what: str


BENCHES = {
    "all-reduce": Bench(["ranks", "size", "all-reduce"], _all_reduce, "all_reduce.json", "time"),
    "ddp": Bench(["model", "ranks", "backend"], _ddp, "ddp.json", "step"),
    "pipeline": Bench(["model", "stages", "pipeline"], _pipeline, "pipeline.json", "step"),
    "compare": Bench(["technique", "ranks"], _compare, "compare.json", "epoch"),
    "launch": Bench(["ranks", "by"], _launch, "launch.json", "run"),
    "placement": Bench(
        ["placement", "cut", "direction", "batch", "trained"],
        _placement,
        "placement.json",
        "hop",
    ),
}


def beside(name: str, here: Record, cpu: Record) -> Table:
    """The medians of a bench here, beside those of the CPU record, and their ratio."""
    bench = BENCHES[name]
    found, others = bench.medians(here), bench.medians(cpu)
    extra = _bandwidth(here) if name == "all-reduce" else {}
    heads = [*bench.heads, f"{bench.what}, here"]
    heads += ["bus GB/s", "of the limit"] if extra else []
    heads += [f"{bench.what}, CPU record", "CPU / here"]
    rows: list[list[Cell]] = []
    for key, value in found.items():
        row: list[Cell] = [_key_cell(head, one) for head, one in zip(bench.heads, key)]
        row += [seconds(value), *extra.get(key, [])]
        if key in others:
            ratio = others[key] / value
            row += [seconds(others[key]), Number(ratio, format_number(ratio))]
        else:
            row += ["", ""]
        rows.append(row)
    return Table("Beside the CPU record", heads, rows, _cpu_note(bench.cpu_file, cpu))


def _bandwidth(record: Record) -> dict[tuple[Hashable, ...], list[Cell]]:
    return {
        (row["world_size"], row["size_bytes"], row["contender"]): [
            gigabytes_per_s(row["bus_bytes_per_s"]),
            share(row["share_of_limit"]),
        ]
        for row in record.get("rows", [])
    }


def _key_cell(head: str, value: Hashable) -> Cell:
    return format_bytes(value) if head == "size" and isinstance(value, int) else str(value)


def _cpu_note(file: str, cpu: Record) -> str:
    if not cpu:
        return f"There is no CPU record here (data/results/{file})."
    machine, versions = cpu["hardware"], cpu["versions"]
    return (
        f"CPU record: data/results/{file}, {machine['cpu']}, {machine['cores']} cores, "
        f"PyTorch {versions['torch']}. Medians; above 1, this run is faster."
    )


def placements(record: Record) -> Iterable[Table]:
    """The tables of the placements at their published size."""
    if rows := record.get("rows", []):
        yield _steps(rows, record)
        yield _hops(rows)
    if stages := record.get("stages", []):
        yield _stages(stages)
    if copies := record.get("copies", []):
        yield _copies(copies)
    if missing := record.get("not_measured", []):
        cells: list[list[Cell]] = [
            [row["placement"], str(row["batch_size"]), _trained(row["frozen"]), row["reason"]]
            for row in missing
        ]
        yield Table("Not measured", ["placement", "batch", "trained", "reason"], cells)


def _trained(frozen: int) -> str:
    return "head" if frozen else "all"


def _steps(rows: list[dict[str, Any]], record: Record) -> Table:
    heads = ["placement", "devices", "batch", "trained", "step", "hops", "loss differs by", "peak"]
    cells: list[list[Cell]] = []
    for row in rows:
        hops_s = sum(hop["median_s"] for hop in row["hops"])
        peak = ", ".join(f"{gpu} {format_bytes(b)}" for gpu, b in row["peak_bytes"].items())
        loss = Number(row["loss_difference"], f"{row['loss_difference']:.1g}")
        cells.append(
            [
                row["placement"],
                ", ".join(row["devices"]),
                str(row["batch_size"]),
                row["trained"],
                seconds(row["step_s"]["median"]),
                seconds(hops_s) if row["hops"] else "",
                loss,
                peak,
            ]
        )
    pixels = record["config"]["pixels"]
    fastest = min(rows, key=lambda row: row["step_s"]["median"] / row["batch_size"])
    note = (
        f"VGG16 on images of {pixels}x{pixels}, all stages in one process. Steps: medians, from "
        "all devices idle to all devices idle. Hops: the sum over cuts and directions of the "
        "medians by CUDA events. The loss is compared with that of the first placement of the "
        f"same batch. The most samples per second: {fastest['placement']}, batch of "
        f"{fastest['batch_size']}, trained: {fastest['trained']}."
    )
    return Table("Steps", heads, cells, note)


def _hops(rows: list[dict[str, Any]]) -> Table:
    heads = ["placement", "cut", "direction", "batch", "trained", "floats a sample", "bytes"]
    heads += ["time", "GB/s"]
    cells: list[list[Cell]] = []
    for row in rows:
        for hop in row["hops"]:
            floats = hop["num_bytes"] // 4 // row["batch_size"]
            cells.append(
                [
                    row["placement"],
                    str(row["split_points"][hop["cut"]]),
                    hop["direction"],
                    str(row["batch_size"]),
                    row["trained"],
                    Number(floats, f"{floats:,}"),
                    Number(hop["num_bytes"], format_bytes(hop["num_bytes"])),
                    seconds(hop["median_s"]),
                    gigabytes_per_s(hop["num_bytes"] / hop["median_s"]),
                ]
            )
    note = (
        "Each time is the median over the steps after the first, by events on the copying stream."
    )
    return Table("Hops", heads, cells, note)


def _stages(rows: list[dict[str, Any]]) -> Table:
    heads = ["placement", "cut", "batch", "bytes", "forward hop", "backward hop", "step"]
    cells: list[list[Cell]] = []
    for row in rows:
        if "error" in row:
            cells.append([row["placement"], "", str(row["batch_size"]), "", row["error"], "", ""])
            continue
        for cut, point in enumerate(row["split_points"]):
            hops = [row["forward_hop_s"][cut], row["backward_hop_s"][cut]]
            cells.append(
                [
                    row["placement"],
                    str(point),
                    str(row["batch_size"]),
                    Number(row["hop_bytes"][cut], format_bytes(row["hop_bytes"][cut])),
                    *(seconds(statistics.median(times)) if times else "" for times in hops),
                    seconds(row["step_s"]["median"]),
                ]
            )
    note = "Labkit's vgg16, all layers trained, one process for each stage; hops by CUDA events."
    if any(row["share_a_gpu"] for row in rows):
        note += " Stages share a GPU: these hops do not cross a link between GPUs."
    return Table("One process for each stage", heads, cells, note)


def _copies(rows: list[dict[str, Any]]) -> Table:
    cells: list[list[Cell]] = [
        [
            row["source"],
            row["target"],
            ("pinned" if row["pinned"] else "pageable") if "pinned" in row else "",
            Number(row["num_bytes"], format_bytes(row["num_bytes"])),
            gigabytes_per_s(row["bytes_per_s"]),
        ]
        for row in rows
    ]
    note = "By CUDA events on the stream that copies, one way at a time, medians."
    return Table("Plain copies", ["from", "to", "host memory", "bytes", "GB/s"], cells, note)
