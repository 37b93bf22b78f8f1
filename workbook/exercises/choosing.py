"""Page 16: five models, each with its cluster, and the layouts in which a step can be spread.

The bytes of a layout and the seconds of its step are predicted: ``workbook.gpt_step``.
"""

from functools import partial
from typing import Any, NamedTuple

from labkit.units import check_choice, format_number, format_seconds, text_table
from workbook.exercises.grader import Verdict, solved
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED, show_verdict
from workbook.gpt_step import GPT, Cluster, Layout, gpt_bytes, gpt_seconds, layouts

# A layout whose step is longer than the best one's by no more than this is as good.
_CLOSE = 1.03

# In words, then as the model takes it: a GPT, its global batch, its cluster.
CASES = {
    "small": (
        "124 million parameters, 64 samples of 1024; a host of 8 GPUs of 24 GB, without NVLink",
        *(GPT(12, 768, 12, length=1024, vocabulary=50304), 64),
        Cluster(8, memory_bytes=24e9, inside=20e9),
    ),
    "medium": (
        "6.6 billion parameters, 64 samples of 4096; a host of 8 A100 of 80 GB with NVLink",
        *(GPT(32, 4096, 32, length=4096, vocabulary=32000), 64, Cluster(8)),
    ),
    "long": (
        "22 billion parameters, 32 samples of 8192; a host of 8 A100 of 80 GB with NVLink",
        *(GPT(48, 6144, 48, length=8192), 32, Cluster(8)),
    ),
    "scattered": (
        "13 billion parameters, 1024 samples of 2048; 16 hosts, each one A100 and 10 Gb/s",
        *(GPT(40, 5120, 40, vocabulary=50304), 1024),
        Cluster(16, gpus_per_host=1, between=1.25e9),
    ),
    "large": (
        "175 billion parameters, 64 samples of 2048; 8 hosts of 8 A100, NVLink, 200 Gb/s a GPU",
        *(GPT(96, 12288, 96), 64, Cluster(64)),
    ),
}
_CURES = {
    "parameters": "ZeRO stage 3, or to cut the model into more parts",
    "gradients": "a ZeRO stage from 2 on, or to cut the model into more parts",
    "optimizer": "a ZeRO stage from 1 on, or to cut the model into more parts",
    "activations": "a smaller micro-batch, tensor parallelism, or to recompute more",
    "compute": "what is computed again",
    "tensor": "all-reduces inside the layers, which nothing hides: cut them over fewer GPUs",
    "hops": "messages between stages: cut the model into fewer",
    "bubble": "the bubble: fewer stages, more micro-batches, or interleaved stages",
    "data": "gradients or parameters that travel between replicas: fewer replicas, "
    "a larger micro-batch, or a lower ZeRO stage",
}


class Ranked(NamedTuple):
    """A layout, bytes on its fullest GPU and seconds, both by what they are for."""

    layout: Layout
    held: dict[str, float]
    parts_s: dict[str, float]
    fits: bool

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())


def look_at(name: str, layout: Layout) -> Ranked:
    """Predict bytes and seconds of a layout; ValueError for one that does not divide the case."""
    model, batch, cluster = CASES[name][1:]
    held = gpt_bytes(model, batch, cluster, layout)
    fits = sum(held.values()) <= cluster.memory_bytes
    return Ranked(layout, held, gpt_seconds(model, batch, cluster, layout), fits)


def ranked(name: str) -> list[Ranked]:
    """Each way to divide the GPUs, with its best micro-batch: those that fit first, by seconds.

    Of equally quick ones that which shards less comes first.
    """
    candidates = [look_at(name, layout) for layout in layouts(*CASES[name][1:])]
    candidates.sort(key=lambda r: (not r.fits, r.step_s, r.layout.stage, sum(r.held.values())))
    best: dict[tuple[int, ...], Ranked] = {}
    for candidate in candidates:
        layout = candidate.layout
        best.setdefault((layout.dp, layout.tp, layout.pp, layout.stage), candidate)
    return list(best.values())


def ranking(name: str) -> str:
    """A table of the six quickest ways that fit, and the three quickest that do not."""
    ways = ranked(name)
    num_fitting = sum(way.fits for way in ways)
    rows = []
    for way in ways[: min(num_fitting, 6)] + ways[num_fitting:][:3]:
        step = format_seconds(way.step_s) if way.fits else "does not fit"
        parts = map(format_seconds, way.parts_s.values())
        rows.append((str(way.layout), _gb(sum(way.held.values())), step, *parts))
    heads = ("layout (predicted)", "GB", "step", *ways[0].parts_s)
    return f"{text_table(heads, rows)}\n{num_fitting} of {len(ways)} ways fit."


def choose(name: str, **layout: Any) -> Verdict:
    """Judge a layout for a case: ``check.choosing.medium(dp=4, tp=2, stage=1)``.

    Without a layout it shows the case. The fields are those of ``Layout``.
    """
    check_choice("case", name, CASES)

    def judge() -> Verdict:
        if not layout:
            return Verdict(f"choosing.{name}", NOT_ATTEMPTED, notes=[CASES[name][0]])
        try:
            for field in layout:
                check_choice("field", field, Layout.__annotations__)
            choice = look_at(name, Layout(**layout))
        except (TypeError, ValueError) as error:
            note = f"This is no layout for it: {error}."
            return Verdict(f"choosing.{name}", NOT_YET, notes=[note])
        held = ", ".join(f"{kind} {_gb(size)} GB" for kind, size in choice.held.items())
        parts = ", ".join(f"{part} {format_seconds(s)}" for part, s in choice.parts_s.items() if s)
        by_model = f"By the calculator it holds {held}; a step is {parts}."
        if wrong := what_is_wrong(name, choice):
            return Verdict(f"choosing.{name}", NOT_YET, notes=[wrong, by_model])
        right = "It fits, and nothing without interleaving is quicker by more than 3%."
        notes = [right, by_model, f"Ranking:\n{ranking(name)}"]
        return Verdict(f"choosing.{name}", PASSED, notes=notes)

    return show_verdict(f"choosing.{name}", judge)


small, medium, long, scattered, large = (partial(choose, name) for name in CASES)


def what_is_wrong(name: str, choice: Ranked) -> str | None:
    """Explain why a layout does not fit, or is slower than the best one by more than 3%."""
    if not choice.fits:
        memory_bytes = CASES[name][3].memory_bytes
        held = choice.held
        most = max(held, key=held.__getitem__)
        return (
            f"It does not fit: {_gb(sum(held.values()))} GB of {_gb(memory_bytes)} GB, most of it "
            f"{most}. What makes that less: {_cure(most, choice.layout)}."
        )
    best = ranked(name)[0]
    if choice.step_s <= _CLOSE * best.step_s:
        return None
    most = max(choice.parts_s, key=lambda part: choice.parts_s[part] - best.parts_s[part])
    return (
        f"It fits, but a step takes {format_seconds(choice.step_s)}, and "
        f"{format_seconds(best.step_s)} is possible. Most of the difference is "
        f"{_cure(most, choice.layout)}."
    )


def _cure(part: str, layout: Layout) -> str:
    """Return what makes a part less, without what this layout has done already."""
    text = _CURES[part]
    if layout.micro_batch == 1:
        text = text.replace("a smaller micro-batch, ", "")
    if layout.stage == 0:
        text = text.replace(
            "a larger micro-batch, or a lower ZeRO stage", "or a larger micro-batch"
        )
    return text


def _gb(num_bytes: float) -> str:
    return format_number(num_bytes / 1e9)


@solved(
    *((7.5e9, dp, tp, pp, stage) for stage in range(4) for dp, tp, pp in ((64, 1, 1), (4, 8, 2))),
    (124e6, 1, 1, 1, 0),
    mistakes={
        "stage 1 shards only the optimizer's 12 bytes, stage 2 also those of gradients": (
            lambda state, n, dp, tp, pp, stage: 16 * n / (tp * pp * dp ** (stage > 0))
        ),
    },
)
def state_bytes(parameters: float, dp: int, tp: int, pp: int, stage: int) -> float:
    """Grade ``fn(parameters, dp, tp, pp, stage)``: bytes per GPU without activations.

    Mixed-precision Adam, 2 + 2 + 12 bytes per parameter; ``stage`` is ZeRO's, 0 to 3.
    """
    num_bytes = 0.0
    for bytes_each, sharded_from in ((2, 3), (2, 2), (12, 1)):
        num_shards = dp if stage >= sharded_from else 1
        num_bytes += bytes_each * parameters / (tp * pp) / num_shards
    return num_bytes
