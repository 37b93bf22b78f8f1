"""Page 08, without ranks: bytes over cuts, a split's step, and the best cuts.

Symbols: L layers, P stages, one device per stage.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor

from labkit.costs.link import Link
from labkit.placement.planner import LayerCost, Profile, best_split, predict_split
from labkit.schedules.split_points import check_split_points
from labkit.units import format_bytes, format_seconds
from workbook.exercises.grader import Verdict, answers, ask
from workbook.exercises.grader.compare import agree, plain, short
from workbook.exercises.grader.exercise import Found
from workbook.exercises.grader.in_process import Question, differs

_KIB, _MS = 1024, 1e-3
# A learner may add up in another order than the planner.
_SAME = 1 + 1e-9

Points = tuple[int, ...]

_SHAPES = ((24, 16, 16), (24, 8, 8), (40, 8, 8), (40, 4, 4), (96,), (10,))
# (shapes, batch size, split points, frozen layers)
_BYTE_CASES: tuple[tuple[tuple, int, Points, int], ...] = (
    (_SHAPES, 4, (2,), 0),
    (_SHAPES, 7, (1, 3, 5), 0),
    (_SHAPES, 1, (4,), 0),
    (_SHAPES, 4, (1, 3, 5), 3),
    (_SHAPES, 3, (2, 4), 1),
    (_SHAPES[::-1], 5, (2, 4), 5),
    (_SHAPES, 4, (), 0),
)


def bytes_over_cuts(fn: Callable) -> Verdict:
    """Grade ``fn(shapes, batch_size, split_points, frozen)``: by cut, the bytes of one step.

    ``shapes`` holds what each layer makes of one sample, a tuple of sizes; numbers are float32.
    Over each cut goes an activation, and its gradient back if anything before the cut is trained,
    which layers 0 to ``frozen`` - 1 are not. Runs in another process.
    """

    def crossing(
        shapes: tuple, batch_size: int, points: Points, frozen: int, behind: int = 1
    ) -> list[int]:
        one_way = [4 * batch_size * math.prod(shapes[cut - behind]) for cut in points]
        return [n * (1 + (cut > frozen)) for cut, n in zip(points, one_way)]

    return answers(
        fn,
        [(case, crossing(*case)) for case in _BYTE_CASES],
        name="placement.bytes_over_cuts",
        signature="shapes, batch_size, split_points, frozen",
        mistakes={
            "over the cut before layer k goes the output of layer k - 1": partial(
                crossing, behind=0
            ),
            "a gradient of the same size comes back where a layer before the cut is trained": (
                lambda shapes, n, points, frozen: crossing(shapes, n, points, len(shapes))
            ),
            "no gradient crosses where all layers before the cut are frozen": (
                lambda shapes, n, points, frozen: crossing(shapes, n, points, 0)
            ),
        },
    )


def _as_list(answer: Any) -> Any:
    answer = plain(answer)
    return answer.tolist() if isinstance(answer, Tensor) else answer


def _profile(name: str, *layers: tuple[int, int, int, int]) -> Profile:
    """By layer: forward ms (backward takes twice that), KiB of output, parameters and held."""
    costs = (
        LayerCost(f"layer {i}", ms * _MS, 2 * ms * _MS, out * _KIB, own * _KIB, held * _KIB)
        for i, (ms, out, own, held) in enumerate(layers)
    )
    return Profile(name, 8, 16 * _KIB, tuple(costs))


# As in a network for images: activations shrink, parameters grow.
_FUNNEL = _profile(
    *("funnel", (4, 156, 2, 180), (2, 136, 6, 172), (2, 100, 10, 136), (1, 44, 14, 68)),
    *((3, 76, 18, 76), (4, 20, 28, 40), (3, 16, 34, 28), (4, 4, 50, 24), (1, 1, 96, 41)),
)
# Small outputs at two places, large ones between them.
_DUMBBELL = _profile(
    *("dumbbell", (2, 90, 12, 60), (1, 16, 8, 80), (3, 200, 12, 70), (4, 180, 8, 90)),
    *((3, 220, 12, 60), (1, 12, 8, 70), (2, 70, 16, 50), (1, 8, 4, 60), (1, 2, 8, 60)),
)
_NEAR, _FAR = Link(1e-4, 1e-8), Link(2e-2, 1e-7)
_STEP_CASES: tuple[tuple[Profile, Points, Link], ...] = (
    (_FUNNEL, (4,), _FAR),
    (_DUMBBELL, (2, 6), _FAR),
    (_DUMBBELL, (1, 3, 5, 8), _NEAR),
    (_FUNNEL, (7, 8), _NEAR),
    (_FUNNEL, (), _FAR),
)


def step_seconds(fn: Callable) -> Verdict:
    """Grade ``fn(profile, split_points, link)``: seconds of a training step without a pipeline.

    All parameters are trained: the step is the compute of all layers, and over each cut an
    activation and a gradient, one message each. Runs in another process.
    """

    def step(profile: Profile, points: Points, link: Link) -> float:
        return predict_split(profile, points, link).step_s

    def compute_s(profile: Profile) -> float:
        return sum(layer.forward_s + layer.backward_s for layer in profile.layers)

    def one_message(profile: Profile, points: Points, link: Link) -> float:
        sizes = [profile.layers[cut - 1].output_bytes for cut in points]
        return compute_s(profile) + sum(link.message_seconds(2 * n) for n in sizes)

    def wrong(question: Question, answer: Any) -> Found:
        found = plain(answer)
        if not isinstance(found, int | float) or agree(found, question.expected):
            return differs(question, answer)
        text = f"for {question.words}, the step takes {format_seconds(question.expected)}, but "
        return f"{text}the function returned {format_seconds(found)}"

    return ask(
        "placement.step_seconds",
        fn,
        [
            Question(case, f"the {case[0].model} with split points {case[1]}", step(*case))
            for case in _STEP_CASES
        ],
        wrong,
        mistakes={
            "each cut is counted once: the activation goes forward, the gradient comes back": (
                lambda profile, points, link: (
                    (step(profile, points, link) + compute_s(profile)) / 2
                )
            ),
            "an activation and its gradient are two messages, and each costs alpha": one_message,
            "the hops are missing: over each cut go an activation and its gradient": (
                lambda profile, points, link: compute_s(profile)
            ),
        },
        signature="profile, split_points, link",
    )


# profile, most stages, link, cap; in the fourth a third device would be of use.
_CASES = (
    (_FUNNEL, 2, _NEAR, 887 * _KIB),
    (_FUNNEL, 3, _NEAR, 640 * _KIB),
    (_DUMBBELL, 3, _NEAR, 460 * _KIB),
    (_DUMBBELL, 2, _NEAR, 460 * _KIB),
    (_DUMBBELL, 4, _FAR, 460 * _KIB),
    (_DUMBBELL, 3, _NEAR, math.inf),
)


def best_cuts(fn: Callable) -> Verdict:
    """Grade ``fn(profile, max_stages, link, cap_bytes)``: the split points of the shortest step.

    There are at most ``max_stages`` devices and one micro-batch, and all parameters are trained: a
    step takes the compute time of all layers, plus the time of an activation and of its gradient
    over each cut. No stage may need more than ``cap_bytes``. Any split that is as quick as the
    planner's is right. Runs in another process.
    """

    def call(fn: Callable, *case: Any) -> Any:
        answer = _as_list(fn(*case))
        return tuple(answer) if isinstance(answer, list) else answer

    questions = []
    for case in _CASES:
        profile, stages, _, cap = case
        words = "no cap" if math.isinf(cap) else f"a cap of {format_bytes(cap)}"
        questions.append(Question(case, f"the {profile.model}, up to {stages} stages, {words}"))
    return ask(
        "placement.best_cuts",
        fn,
        questions,
        lambda question, answer: _wrong_split(question, answer, *question.args),
        mistakes={
            "the cap is forgotten": lambda profile, n, link, cap: _search(
                profile, n, link, math.inf
            ),
            "fewer cuts than devices allow may be better, and here all are used": partial(
                _search, all_cuts=True
            ),
        },
        call=call,
        right=lambda answers: f"all {len(answers)} splits are as quick as the planner's",
        signature="profile, max_stages, link, cap_bytes",
        may_call=("predict_split",),
    )


def _wrong_split(
    question: Question, answer: Any, profile: Profile, stages: int, link: Link, cap: float
) -> Found:
    text = f"for {question.words}, {short(answer)}"
    if not isinstance(answer, tuple):
        return f"{text} is no sequence of split points"
    try:
        points = check_split_points(answer, len(profile.layers))
    except ValueError as error:
        return f"{text}: {error}"
    if len(points) >= stages:
        return f"{text} makes {len(points) + 1} stages"
    split = predict_split(profile, points, link)
    for stage, needed in enumerate(split.memory_bytes):
        if needed > cap:
            return f"{text}: stage {stage} needs {format_bytes(needed)}"
    best = []
    for count in range(1, stages + 1):
        with suppress(ValueError):  # no split into so few stages keeps the cap
            best.append(best_split(profile, count, link, memory_cap_bytes=cap).step_s)
    if split.step_s <= min(best) * _SAME:
        return None
    step_s, best_s = format_seconds(split.step_s), format_seconds(min(best))
    return f"{text}: its step takes {step_s}, {best_s} is possible"


def _search(
    profile: Profile, stages: int, link: Link, cap: float, all_cuts: bool = False
) -> Points | None:
    """The cheapest of all splits that keep the cap; None if there is none."""
    found = []
    for count in range(stages - 1 if all_cuts else 0, stages):
        for points in combinations(range(1, len(profile.layers)), count):
            split = predict_split(profile, points, link)
            if max(split.memory_bytes) <= cap:
                found.append((sum(split.hop_s), points))
    return min(found)[1] if found else None
