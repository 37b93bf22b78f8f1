"""Make the README's picture: a function, the processes that ran it, and who waited.

What is drawn is the source of ``all_reduce`` below, what its ranks have sent, and their timeline.
Writes data/results/readme_picture.png and, with a record of the run, readme_picture.json.
"""

import inspect
import json
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit import EmulatedLink, RunResult, run
from labkit.engine import devices
from labkit.engine.files import write_atomically
from labkit.engine.tracing import Trace
from workbook.plots import CaptionedFigure
from workbook.plots.figure import WIDTH_IN, add_legend, drawn, fixed_axes, label_lanes
from workbook.plots.palette import BLUE, DARK, GRID
from workbook.plots.timeline import draw_spans, timeline

RESULTS = Path(__file__).resolve().parents[1] / "data" / "results"
WORLD_SIZE, NUM_ELEMENTS, HEIGHT_IN = 4, 250_000, 5.0
# 1 MB takes 80 ms, so that a message is wide enough to be seen, and waits for no core.
LINK = EmulatedLink(0.0, 12.5e6)
HEADS = ("You write the technique", "Real processes run it", "You see who waits for whom")


def all_reduce(comm, tensor):
    if comm.rank == 0:
        theirs = torch.empty_like(tensor)
        for r in range(1, comm.world_size):
            tensor += comm.recv(theirs, r)
        for r in range(1, comm.world_size):
            comm.send(tensor, r)
    else:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)


def reduce_ones(comm) -> float:
    tensor = torch.ones(NUM_ELEMENTS)
    comm.barrier()
    all_reduce(comm, tensor)
    return tensor[0].item()


def main() -> None:
    result = run(reduce_ones, world_size=WORLD_SIZE, device="cpu", link=LINK)
    # The first sentence of what labkit says of the run.
    explained = str(result.explain()).partition(". ")[0] + "."
    picture = draw(result, explained)
    picture.save(RESULTS / "readme_picture.png")
    record = {
        "command": "python tools/readme_picture.py",
        "source": inspect.getsource(all_reduce),
        "world_size": WORLD_SIZE,
        "link": str(LINK),
        "values": result.values,
        "messages": result.messages,
        "bytes_sent": result.bytes_sent,
        "explained": explained,
        "alt": picture.alt,
        "hardware": devices.hardware(),
    }
    write_atomically(RESULTS / "readme_picture.json", json.dumps(record, indent=2) + "\n")


@drawn
def draw(result: RunResult, explained: str) -> CaptionedFigure:
    """The three steps: the function, its processes with what they sent, their timeline."""
    # From the end of the barrier before the function on.
    start_s = min(span.start_s for span in result.trace.spans if span.kind == "communicate")
    spans = [
        replace(span, start_s=max(0.0, span.start_s - start_s), end_s=span.end_s - start_s)
        for span in result.trace.spans
        if span.end_s > start_s
    ]
    trace, figure = Trace.merge([spans]), Figure(figsize=(WIDTH_IN, HEIGHT_IN))
    width, height = 72 * figure.get_size_inches()
    disc = {"boxstyle": "circle,pad=0.25", "facecolor": BLUE, "edgecolor": "none"}
    for number, (x, down) in enumerate(((10, 18), (362, 18), (10, 184))):
        look = {"weight": "bold", "va": "center"}
        y = (height - down) / height
        figure.text(x / width, y, str(number + 1), color="white", bbox=disc, **look)
        figure.text((x + 20) / width, y, HEADS[number], size=14, **look)
    code = frame(fixed_axes(figure, 10, 340, height - 162, height - 36))
    text = inspect.getsource(all_reduce).rstrip()
    code.text(0.04, 0.49, text, family="monospace", va="center", size=9.5, linespacing=1.2)
    boxes = frame(fixed_axes(figure, 362, width - 10, height - 162, height - 36))
    for rank, (x, y) in enumerate(((0.5, 0.77), (0.18, 0.23), (0.5, 0.23), (0.82, 0.23))):
        sent = f"rank {rank}\nsends {result.bytes_sent[rank] / 1e6:g} MB"
        box = {"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": BLUE}
        boxes.text(x, y, sent, ha="center", va="center", size=9.5, bbox=box)
        if rank:
            ends = (x, 0.42), (0.5 + 0.3 * (x - 0.5), 0.58)
            boxes.annotate("", *ends, arrowprops={"arrowstyle": "<->", "color": DARK})
    lanes = fixed_axes(figure, 52, width - 10, 60, height - 204)
    lanes.set_xlim(0, 1e3 * max(span.end_s for span in trace.spans))
    add_legend(figure, draw_spans(lanes, list(trace.spans), trace.ranks, 1e-3, model=False))
    label_lanes(lanes, [f"rank {rank}" for rank in trace.ranks])
    lanes.set_xlabel("time since the start (ms)")
    alone = timeline(trace)
    return CaptionedFigure(figure, alt=f"{alone.alt} {explained}", caption=alone.caption)


def frame(axes: Axes) -> Axes:
    """Axes from 0 to 1 without ticks, with a thin frame."""
    axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1), facecolor="#F7F7F7")
    for side in axes.spines.values():
        side.set(visible=True, color=GRID)
    return axes


if __name__ == "__main__":
    main()
