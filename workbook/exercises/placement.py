"""The checks of page 08 without ranks: bytes over cuts, a split's step, and the best cuts.

Symbols: L layers, P stages, one device per stage.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from torch import Tensor

from labkit.costs.link import Link
from labkit.placement.planner import SplitModel, best_split, predict_split
from labkit.placement.stage_costs import LayerCost, Profile
from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.units import format_bytes, format_count, format_seconds
from workbook.exercises.grader import Mistake, Verdict
from workbook.exercises.grader.compare import agree, plain
from workbook.exercises.grader.in_process import Question, answers, ask, differs
from workbook.exercises.grader.report import told

_KIB, _MS = 1024, 1e-3
# A learner may add up in another order than the planner.
_SAME = 1 + 1e-9

Points = tuple[int, ...]


def bytes_over_cuts(fn: Callable) -> Verdict:
    """Grade ``fn(shapes, batch_size, split_points, frozen)``: by cut, the bytes of one step.

    ``shapes`` holds what each layer makes of one sample, a tuple of sizes; numbers are float32.
    Over each cut goes an activation, and its gradient back if anything before the cut is trained,
    which layers 0 to ``frozen`` - 1 are not. Runs in this process.
    """
    return answers(
        fn,
        [(case, _crossing(*case)) for case in BYTE_CASES],
        name="placement.bytes_over_cuts",
        signature="shapes, batch_size, split_points, frozen",
        mistakes=BYTE_MISTAKES,
        kind=_as_list,
    )


def step_seconds(fn: Callable) -> Verdict:
    """Grade ``fn(profile, split_points, link)``: seconds of a training step without a pipeline.

    All parameters are trained: the step is the compute of all layers, and over each cut an
    activation and a gradient, one message each. Runs in this process.
    """
    questions = []
    for profile, points, link in STEP_CASES:
        words = f"the {profile.model} with split points {points}"
        due = predict_split(profile, points, link).step_s
        questions.append(Question((profile, points, link), words, due))
    judge = partial(
        ask,
        "placement.step_seconds",
        fn,
        questions,
        _wrong_step,
        mistakes=STEP_MISTAKES.items(),
        signature="profile, split_points, link",
    )
    return told("placement.step_seconds", judge)


def best_cuts(fn: Callable) -> Verdict:
    """Grade ``fn(profile, max_stages, link, cap_bytes)``: the split points of the shortest step.

    There are at most ``max_stages`` devices and one micro-batch, and all parameters are trained: a
    step takes the compute time of all layers, plus the time of an activation and of its gradient
    over each cut. No stage may need more than ``cap_bytes``. Any split that is as quick as the
    planner's is right. Runs in this process.
    """
    mistakes = [(id, partial(_search_by, rule)) for id, rule in MISTAKES]
    praise = f"all {len(CASES)} splits are as quick as the planner's, and keep their caps"
    judge = partial(
        ask,
        "placement.best_cuts",
        fn,
        [Question(tuple(case), str(case)) for case in CASES],
        _problem,
        mistakes=mistakes,
        call=_points,
        signature="profile, max_stages, link, cap_bytes",
        may_call=("predict_split",),
        right=lambda answers: praise,
    )
    return told("placement.best_cuts", judge)


# Bytes over cuts

_SHAPES = ((24, 16, 16), (24, 8, 8), (40, 8, 8), (40, 4, 4), (96,), (10,))
# (shapes, batch size, split points, frozen layers)
BYTE_CASES: tuple[tuple[tuple, int, Points, int], ...] = (
    (_SHAPES, 4, (2,), 0),
    (_SHAPES, 7, (1, 3, 5), 0),
    (_SHAPES, 1, (4,), 0),
    (_SHAPES, 4, (1, 3, 5), 3),
    (_SHAPES, 3, (2, 4), 1),
    (_SHAPES[::-1], 5, (2, 4), 5),
    (_SHAPES, 4, (), 0),
)


def _crossing(
    shapes: tuple[tuple[int, ...], ...],
    batch_size: int,
    points: Points,
    frozen: int,
    *,
    behind: int = 1,
    size: int = 4,
    ways: Callable[[int, int], int] = lambda cut, frozen: 1 + (cut > frozen),
    whole: Callable = list,
) -> Any:
    """The right answer; each option makes a mistake.

    Args:
        shapes, batch_size, points, frozen: the arguments of a call.
        behind: 1 takes the output of the layer before the cut, 0 that of the layer behind it.
        size: bytes of a number.
        ways: (cut, frozen) -> how many tensors cross.
        whole: what becomes of the numbers by cut.
    """
    one_way = [batch_size * size * math.prod(shapes[cut - behind]) for cut in points]
    return whole(num_bytes * ways(cut, frozen) for cut, num_bytes in zip(points, one_way))


BYTE_MISTAKES: dict[str, Callable[..., Any]] = {
    "crossing.output_behind": partial(_crossing, behind=0),
    "crossing.numbers": partial(_crossing, size=1),
    "crossing.eight_bytes": partial(_crossing, size=8),
    "crossing.one_sample": lambda shapes, n, points, frozen: _crossing(shapes, 1, points, frozen),
    "crossing.one_way": partial(_crossing, ways=lambda cut, frozen: 1),
    "crossing.frozen_ignored": partial(_crossing, ways=lambda cut, frozen: 2),
    "crossing.frozen_at_cut": partial(_crossing, ways=lambda cut, frozen: 1 + (cut >= frozen)),
    "crossing.frozen_reversed": partial(_crossing, ways=lambda cut, frozen: 1 + (cut <= frozen)),
    "crossing.nothing_frozen": partial(_crossing, ways=lambda cut, frozen: 2 * (cut > frozen)),
    "crossing.total": partial(_crossing, whole=sum),
    "crossing.total_in_list": partial(_crossing, whole=lambda numbers: [sum(numbers)]),
}


def _as_list(answer: Any) -> Any:
    answer = plain(answer)
    return answer.tolist() if isinstance(answer, Tensor) else answer


# The step of a split


def _wrong_step(question: Question, answer: Any) -> Mistake | None:
    found = plain(answer)
    if agree(found, question.due) or not isinstance(found, (int, float)):
        return differs(question, answer)
    due, seconds = format_seconds(question.due), format_seconds(found)
    return Mistake("step.differs", case=question.words, due=due, found=seconds)


def _points(fn: Callable, *case: Any) -> Any:
    answer = plain(fn(*case))
    if isinstance(answer, Tensor):
        answer = answer.tolist()
    return tuple(answer) if isinstance(answer, list) else answer


def _search_by(rule: dict[str, Any], *case: Any) -> Points | None:
    return search(_Case(*case), **rule)


class _Case(NamedTuple):
    """The arguments of a call."""

    profile: Profile
    max_stages: int
    link: Link
    cap_bytes: float

    def __str__(self) -> str:
        cap = "no cap"
        if math.isfinite(self.cap_bytes):
            cap = f"a cap of {format_bytes(self.cap_bytes)}"
        return f"the {self.profile.model}, up to {self.max_stages} stages, {cap}"

    def split(self, points: Points) -> SplitModel:
        return predict_split(self.profile, points, self.link)

    def best_s(self) -> float:
        """The planner's shortest step, over all numbers of stages."""
        found = []
        for stages in range(1, self.max_stages + 1):
            with suppress(ValueError):  # no split into so few stages keeps the cap
                best = best_split(self.profile, stages, self.link, memory_cap_bytes=self.cap_bytes)
                found.append(best.step_s)
        return min(found)


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
# No two mistakes below find the same splits for all of these.
CASES = (
    _Case(_FUNNEL, 2, _NEAR, 887 * _KIB),
    _Case(_FUNNEL, 3, _NEAR, 640 * _KIB),
    _Case(_DUMBBELL, 3, _NEAR, 460 * _KIB),
    _Case(_DUMBBELL, 2, _NEAR, 460 * _KIB),  # a third device would be of use
    _Case(_DUMBBELL, 4, _FAR, 460 * _KIB),
    _Case(_DUMBBELL, 3, _NEAR, math.inf),
)


STEP_CASES: tuple[tuple[Profile, Points, Link], ...] = (
    (_FUNNEL, (4,), _FAR),
    (_DUMBBELL, (2, 6), _FAR),
    (_DUMBBELL, (1, 3, 5, 8), _NEAR),
    (_FUNNEL, (7, 8), _NEAR),
    (_FUNNEL, (), _FAR),
)


def _step(
    profile: Profile,
    points: Points,
    link: Link,
    *,
    compute_s: Callable[[LayerCost], float] = lambda layer: layer.forward_s + layer.backward_s,
    stages: Callable[[list[float]], float] = sum,
    behind: int = 1,
    hop_s: Callable[[Link, int], float] = lambda link, n: 2 * link.message_seconds(n),
    hops: Callable[[list[float]], float] = sum,
) -> float:
    """The right answer; each option makes a mistake.

    Args:
        profile, points, link: the arguments of a call.
        compute_s: seconds of one layer.
        stages: seconds by stage -> seconds of the computing.
        behind: as in ``_crossing``.
        hop_s: (link, bytes) -> seconds of both messages over a cut.
        hops: seconds by cut -> seconds of all hops.
    """
    layers = profile.layers
    bounds = stage_bounds(points, len(layers))
    computing = [sum(map(compute_s, layers[start:end])) for start, end in bounds]
    crossing = [hop_s(link, layers[cut - behind].output_bytes) for cut in points]
    return stages(computing) + (hops(crossing) if crossing else 0.0)


def _in_one_message(profile: Profile, points: Points, link: Link) -> float:
    num_bytes = sum(profile.layers[cut - 1].output_bytes for cut in points)
    return _step(profile, (), link) + (2 * link.message_seconds(num_bytes) if points else 0.0)


STEP_MISTAKES: dict[str, Callable[..., float]] = {
    "step.slowest_stage": partial(_step, stages=max),
    "step.slowest_stage_alone": partial(_step, stages=max, hops=lambda hops: 0.0),
    "step.shared_out": partial(_step, stages=lambda seconds: sum(seconds) / len(seconds)),
    "step.no_hops": partial(_step, hops=lambda hops: 0.0),
    "step.one_way": partial(_step, hop_s=lambda link, n: link.message_seconds(n)),
    "step.one_message": partial(_step, hop_s=lambda link, n: link.message_seconds(2 * n)),
    "step.all_cuts_in_one": _in_one_message,
    "step.no_latency": partial(_step, hop_s=lambda link, n: 2 * link.beta_s_per_byte * n),
    "step.longest_hop": partial(_step, hops=max),
    "step.output_behind": partial(_step, behind=0),
    "step.forward_alone": partial(_step, compute_s=lambda layer: layer.forward_s),
    "step.hops_alone": partial(_step, stages=lambda seconds: 0.0),
}


def _problem(question: Question, answer: Any) -> Mistake | None:
    """What is wrong with one answer; None where it is as good as the planner's."""
    found = _wrong_split(_Case(*question.args), answer)
    return Mistake("cuts.case", found, case=question.words) if found else None


def _wrong_split(case: _Case, answer: Any) -> Mistake | None:
    if not isinstance(answer, tuple):
        return Mistake("cuts.kind", answer=repr(answer))
    try:
        points = check_split_points(answer, len(case.profile.layers))
    except ValueError as error:
        return Mistake("cuts.invalid", error=error)
    if len(points) >= case.max_stages:
        stages, devices = len(points) + 1, format_count(case.max_stages, "device")
        return Mistake("cuts.devices", points=points, stages=stages, devices=devices)
    split, best_s = case.split(points), case.best_s()
    for stage, needed in enumerate(split.memory_bytes):
        if needed > case.cap_bytes:
            return Mistake("cuts.memory", points=points, stage=stage, needs=format_bytes(needed))
    if split.step_s <= best_s * _SAME:
        return None
    yours, best = format_seconds(split.step_s), format_seconds(best_s)
    return Mistake("cuts.slower", points=points, yours=yours, best=best)


# The right search, and the same search with a mistake in it

Cost = Callable[[_Case, Points], float]


def _needed(case: _Case, points: Points) -> float:
    return max(case.split(points).memory_bytes)


def search(
    case: _Case,
    cost: Cost = lambda case, points: sum(case.split(points).hop_s),
    needed: Cost = _needed,
    cuts: str = "up to all",
) -> Points | None:
    """The cheapest of all splits that keep the cap; None if there is none.

    Args:
        case: the arguments of a call.
        cost: what to minimise.
        needed: the bytes to compare with the cap.
        cuts: how many: "up to all", "all" that the devices allow, or the "fewest" that fit.
    """
    layers, most = range(1, len(case.profile.layers)), case.max_stages - 1
    fitting = [
        points
        for count in range(most if cuts == "all" else 0, most + 1)
        for points in combinations(layers, count)
        if needed(case, points) <= case.cap_bytes
    ]
    if cuts == "fewest":
        fitting = [points for points in fitting if len(points) == len(fitting[0])]
    return min(fitting, key=lambda points: (cost(case, points), points), default=None)


def _largest_stage(of: Callable[[LayerCost], float]) -> Cost:
    def cost(case: _Case, points: Points) -> float:
        layers = case.profile.layers
        bounds = stage_bounds(points, len(layers))
        return max(sum(map(of, layers[start:end])) for start, end in bounds)

    return cost


_compute_s = _largest_stage(lambda layer: layer.forward_s + layer.backward_s)
_num_layers = _largest_stage(lambda layer: 1)
_nothing = _largest_stage(lambda layer: 0)
_values_alone = _largest_stage(lambda layer: layer.parameter_bytes + layer.held_bytes)
_parameters_alone = _largest_stage(lambda layer: 3 * layer.parameter_bytes)


def _bytes_behind(case: _Case, points: Points) -> float:
    layers = case.profile.layers
    return sum(case.link.message_seconds(layers[point].output_bytes) for point in points)


# A mistake's id -> a search with this mistake.
MISTAKES: list[tuple[str, dict]] = [
    ("cuts.equal_layers", {"cost": _num_layers, "cuts": "all"}),
    ("cuts.equal_layers", {"cost": _num_layers, "cuts": "all", "needed": _nothing}),
    ("cuts.equal_seconds", {"cost": _compute_s, "cuts": "all"}),
    ("cuts.equal_seconds", {"cost": _compute_s, "cuts": "all", "needed": _nothing}),
    ("cuts.cap_forgotten", {"needed": _nothing}),
    ("cuts.cap_forgotten", {"needed": _nothing, "cuts": "all"}),
    ("cuts.cap_excluded", {"needed": lambda case, points: _needed(case, points) + 1}),
    ("cuts.output_behind", {"cost": _bytes_behind}),
    ("cuts.output_behind", {"cost": _bytes_behind, "cuts": "all"}),
    ("cuts.all_devices", {"cuts": "all"}),
    ("cuts.fewest", {"cuts": "fewest"}),
    ("cuts.bytes_alone", {"cost": lambda case, points: sum(case.split(points).hop_bytes)}),
    ("cuts.largest_hop", {"cost": lambda case, points: max(case.split(points).hop_s, default=0)}),
    ("cuts.value_alone", {"needed": _values_alone}),
    ("cuts.activations_forgotten", {"needed": _parameters_alone}),
]
