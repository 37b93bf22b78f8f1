"""The jobs of page 15 that end without an error, run on real ranks: each leaves a ``Case``.

Each has two possible faults in one program: which of them, on which rank and in which tensor is
drawn with ``seed``. What is right is what one device computes, in float64. Symbols: P ranks.
"""

import itertools
import random
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

import labkit
from labkit import run
from labkit.training.diff import Comparison, diff_records
from workbook.exercises.cases import Case, case_of, with_torch_seed
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.programs import silent

_POSITIONS = 12
_SEQUENCES = 4
_MATRICES = ("gate", "key", "query", "up", "value")


@with_torch_seed
def tokens(seed: int) -> Case:
    """Clues: ``lengths`` {rank: by micro-batch, by sequence}; ``losses`` {who: by step};
    ``gradients`` of step 0: "one device", "used", and by rank "own" and "of its tokens at once".
    """
    drawn = random.Random(seed)
    P = 3
    parts = 2
    steps = 8
    usual = 24
    few = drawn.choice([6, 8, 12])
    rank = drawn.randrange(P)
    is_rank = drawn.random() < 0.5
    counts = [[usual] * parts for _ in range(P)]  # tokens, by rank and micro-batch
    counts[rank] = [few] * parts if is_rank else drawn.sample([few, 2 * usual - few], parts)
    times = max(counts[rank] + [usual]) / few
    lengths = torch.tensor([[_lengths(drawn, count) for count in own] for own in counts])
    x = random_tensor(seed, P, parts, _SEQUENCES, _POSITIONS, 4).double()
    y = x.sum(-1, keepdim=True).sin() + torch.arange(P).double().reshape(P, 1, 1, 1, 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)).double()
    data = (x, y, lengths)
    at_once = tuple(part.flatten(1, 2).unsqueeze(1) for part in data)
    alone = tuple(part.flatten(0, 2)[None, None] for part in data)
    ranks = run(silent.tokens, model, data, steps, world_size=P, device="cpu").values
    whole = run(silent.tokens, model, at_once, 1, world_size=P, device="cpu").values
    (device,) = run(silent.tokens, model, alone, steps, world_size=1, device="cpu").values
    own = [log[0]["own"] for log in ranks]
    own_at_once = [log[0]["own"] for log in whole]
    used = ranks[0][0]["gradient"]
    right = device[0]["gradient"]
    text = f"""
    - the means of micro-batches with unequally many tokens count alike: each rank's own gradient
      is that of its tokens at once, to {max(map(apart, own, own_at_once)):.1g}
    - the means of ranks with unequally many tokens count alike: all have {sum(counts[0])} tokens
    - padding counts in the loss: then rank {rank} would begin with a loss of
      {functional.mse_loss(model(x[rank]), y[rank]):.3f}, and not {ranks[rank][0]["loss"]:.3f}
    - gradients are divided by another number than there are ranks: what is used is the mean of
      {P} ranks' gradients, to {apart(torch.stack(own).mean(0), used):.1g}
    - the ranks have unequal numbers of sequences: each has {parts} times {_SEQUENCES}
    - the replicas have drifted apart: {P} ranks end with {_states(ranks)} state
    rank: has micro-batches of {usual} tokens, as most ranks do
    times: is not the number of tokens in the largest micro-batch / that in the smallest
    line: takes no mean, or one of numbers that stand for equally many tokens
    solved: a token in the smallest micro-batch of rank {rank} counts {times:.3g} times as much as
      one in the largest, and the gradient is {apart(used, right):.0%} off
    """
    losses = {f"rank {r}": [step["loss"] for step in log] for r, log in enumerate(ranks)}
    losses["one device"] = [step["loss"] for step in device]
    clues: dict[str, Any] = {"lengths": dict(enumerate(lengths.tolist())), "losses": losses}
    clues["gradients"] = {"used": used, "one device": right}
    clues["gradients"] |= {"own": own, "of its tokens at once": own_at_once}
    clues["job"] = (silent.tokens, (model, alone), (model, data))
    line = "average_gradients(" if is_rank else "torch.stack(losses).mean()"
    answer = {"rank": rank, "times": times, "line": line}
    return case_of(silent.tokens, P, drawn, text, clues, right=int(is_rank), **answer)


def _lengths(drawn: random.Random, total: int) -> list[int]:
    """The lengths of a micro-batch's sequences, with ``total`` tokens in all."""
    lengths = [1] * _SEQUENCES
    for _ in range(total - _SEQUENCES):
        lengths[drawn.choice([n for n, x in enumerate(lengths) if x < _POSITIONS])] += 1
    return lengths


def _states(logs: list[list[dict[str, Any]]]) -> int:
    """Count the different states that the ranks end with."""
    return len({str(log[-1]["checksums"]) for log in logs})


def apart(tensor: Tensor, other: Tensor) -> float:
    """Length of the difference of two tensors, relative to the second."""
    return ((tensor - other).norm() / other.norm()).item()


@with_torch_seed
def blocks(seed: int) -> Case:
    """Clues: ``kinds`` of the blocks; ``losses`` {who: number}; by weight, the last first,
    ``lengths``: of the gradient of each rank's part, relative to that of one device.
    """
    drawn = random.Random(seed)
    P = drawn.choice([2, 3])
    width = 6
    hidden = 12
    is_lost = drawn.random() < 0.5
    fault = "sine" if is_lost else "square"
    kinds = drawn.sample(["tanh", "gate", "softplus", fault], 4)
    block = kinds.index(fault)
    shapes = {"embed.0": (5, width)}
    for number in range(len(kinds)):
        shapes[f"block {number}.0"] = (width, hidden)
        shapes[f"block {number}.1"] = (hidden, width)
    shapes["head.0"] = (width, 3)
    weights = {name: torch.randn(shape).double() / 2 for name, shape in shapes.items()}
    data = (torch.randn(8, 5).double(), torch.randn(8, 3).double())
    parts = {name: parts_of(name, weight, P) for name, weight in weights.items()}
    alone = {name: [weight] for name, weight in weights.items()}
    ranks = run(silent.blocks, kinds, parts, data, world_size=P, device="cpu").values
    (device,) = run(silent.blocks, kinds, alone, data, world_size=1, device="cpu").values
    lengths = {}
    off = {}
    for name in reversed(shapes):
        right = parts_of(name, device["gradients"][name], P)
        rank_gradients = [log["gradients"][name] for log in ranks]
        lengths[name] = [(a.norm() / b.norm()).item() for a, b in zip(rank_gradients, right)]
        off[name] = max(map(apart, rank_gradients, right))
    good = [name for name in off if off[name] < 1e-9]
    ratios = [ratio for name in off.keys() - good for ratio in lengths[name]]
    losses = {f"rank {r}": log["loss"] for r, log in enumerate(ranks)}
    text = f"""
    - backward adds up once more what all ranks have alike: wrong gradients would be {P} times as
      long, and are {min(ratios):.3g} to {max(ratios):.3g} times
    - backward does not add up what the ranks have of a gradient: no part is missing, all wrong
      gradients are {ratios[0]:.4g} times as long
    - gradients are averaged over the ranks in place of summed: then all would be {1 / P:.3g} times
      as long, and {len(good)} of {len(off)} are right
    - a rank has another part of a weight: the loss is that of one device, to
      {max(abs(loss - device["loss"]) for loss in losses.values()):.1g}
    - the ranks add up in another order than one device: that explains
      {max(off[name] for name in good):.1g}, and not {max(off.values()):.1g}
    - the ranks read different samples: all have the loss {ranks[0]["loss"]:.6f}
    block: is not it: from the loss down {len(good)} gradients are right before the first wrong one
    line: is in no block that is at fault, or right in backward
    solved: backward is wrong in block {block} ({fault}), and so are the gradients of
      {len(off) - len(good)} of {len(off)} weights, though every loss is right
    """
    clues = {"kinds": kinds, "lengths": lengths, "losses": losses | {"one device": device["loss"]}}
    line = "torch.sin(x @ first)" if is_lost else "self.total, self.total"
    choices = {"block": list(range(len(kinds)))}
    answer = {"block": block, "line": line}
    return case_of(silent.Blocks, P, drawn, text, clues, choices, int(is_lost), **answer)


def parts_of(name: str, weight: Tensor, world_size: int) -> list[Tensor]:
    """The parts of the ranks: a block's inner features are divided, the others are not."""
    if not name.startswith("block"):
        return [weight] * world_size
    return [part.contiguous() for part in weight.chunk(world_size, int(name.endswith(".0")))]


@with_torch_seed
def muon(seed: int) -> Case:
    """Clues: ``rows`` {matrix: of each rank}; ``losses`` {who: by step}; ``gradients`` and
    ``changes`` of step 0, {who: {matrix: [R, D]}}.
    """
    drawn = random.Random(seed)
    P = 3
    unshards = drawn.random() < 0.5
    least, most = (9, 27) if unshards else (2, 6)
    heights: list[int] = []
    counts: dict[str, list[int]] = {}
    divided: list[str] = []
    # A cut between two matrices harms none.
    while not divided:
        heights = [drawn.randint(least, most) for _ in _MATRICES]
        # All ranks have equally many rows.
        heights[-1] += -sum(heights) % P
        rows = dict(zip(_MATRICES, silent.rows_by_rank(heights, P)))
        counts = {name: [part.stop - part.start for part in own] for name, own in rows.items()}
        divided = [name for name, own in counts.items() if own.count(0) < P - 1]
    weights = {name: torch.randn(height, 8).double() for name, height in zip(_MATRICES, heights)}
    start = parameters_to_vector(weights.values())
    data = (torch.randn(24, 8).double(), torch.randn(24, sum(heights)).double().sign())
    job = (nn.ParameterDict(weights), data, unshards)
    ranks = run(silent.muon, *job, 6, world_size=P, device="cpu").values
    (device,) = run(silent.muon, *job, 6, world_size=1, device="cpu").values
    changes = {}
    gradients = {}
    for run_name, log in ((f"{P} ranks", ranks[0]), ("one device", device)):
        changes[run_name] = _matrices(weights, log[0]["weights"] - start)
        gradients[run_name] = _matrices(weights, log[0]["gradient"])
    rank_changes, right = changes.values()
    off = {name: apart(rank_changes[name], right[name]) for name in weights}
    worst = max(divided, key=lambda name: off[name])
    cosine = functional.cosine_similarity(rank_changes[worst], right[worst], 1).min()
    text = f"""
    - a rule for whole matrices is applied to a part of a matrix: each row of {worst} changes in
      its direction (cosine {cosine:.6f}), only too little or too much
    - a factor is computed from the shape of a part of a matrix: rows of {worst} change in another
      direction, too (cosine {cosine:.2f})
    - the gradients are averaged wrongly: those of step 0 are one device's, to
      {apart(ranks[0][0]["gradient"], device[0]["gradient"]):.1g}
    - a rank's momentum is lost: it begins in step 1, and {worst} is {off[worst]:.0%} off in step 0
    - a rank does not get the rows of the others: {P} ranks end with {_states(ranks)} state
    - Newton-Schulz is inexact: some matrices change as on one device, to {min(off.values()):.1g}
    matrices: are not those, of {len(off)}, that change otherwise than on one device
    line: does the same with a part of a matrix as with all of it, or was not executed
    solved: the matrices with rows on more than one rank change otherwise than on one device
      ({", ".join(divided)}), by up to {off[worst]:.0%}
    """
    losses = {f"rank {r}": [step["loss"] for step in log] for r, log in enumerate(ranks)}
    losses["one device"] = [step["loss"] for step in device]
    clues = {"rows": counts, "losses": losses, "job": (silent.muon, job, job)}
    clues |= {"changes": changes, "gradients": gradients}
    line = "scale = max(" if unshards else "orthogonal(shard)"
    choices = {"matrices": list(weights)}
    answer = {"matrices": divided, "line": line}
    return case_of(silent.Muon, P, drawn, text, clues, choices, int(unshards), **answer)


def _matrices(like: Mapping[str, Tensor], vector: Tensor) -> dict[str, Tensor]:
    """Cut a vector into tensors, each in the shape of that in ``like``."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts)}


@with_torch_seed
def last_bits(seed: int) -> Case:
    """Clues: ``versions`` that the ranks have, {"gradients of step 0": {tensor: number}, and so on
    "weights in the end"}; ``distances`` of the replicas {dtype: by step}.
    """
    drawn = random.Random(seed)
    P = drawn.choice([3, 4])
    in_turns = drawn.random() < 0.5
    # In each order another layer is the smallest, and no other is as small.
    widths = [8, *drawn.sample([6, 11, 17], 3), 8]
    layers = [(nn.Linear(*pair, bias=False), nn.Tanh()) for pair in itertools.pairwise(widths)]
    model = nn.Sequential(*itertools.chain(*layers))
    weights = dict(model.named_parameters())
    recipe = {"lr": 1.0, "decay": 2e-7, "decayed": set(weights), "one_shot_below": 0}
    tensor = drawn.choice(list(weights))
    if in_turns:
        tensor = min(weights, key=lambda name: weights[name].numel())
        recipe["one_shot_below"] = weights[tensor].numel() + 1
    recipes = [dict(recipe) for _ in range(P)]
    if not in_turns:
        recipes[drawn.randrange(P)]["decayed"] = set(weights) - {tensor}
    x, y = torch.randn(2, P, 30, 8, 8)
    distances = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        job = (model.to(dtype), (x.to(dtype), y.sign().to(dtype)), recipes)
        logs = run(silent.last_bits, *job, world_size=P, device="cpu").values
        distances[name] = [_spread(steps).norm().item() for steps in zip(*logs)]
    versions = {
        "gradients of step 0": _versions(weights, [log[0]["gradient"] for log in logs]),
        "weights in the end": _versions(weights, [log[-1]["weights"] for log in logs]),
    }
    num_apart = int(_spread([log[-1] for log in logs]).count_nonzero())
    first, *_, last = distances["float32"]
    last_in_64 = distances["float64"][-1]
    text = f"""
    - the ranks add up a tensor in different orders: in step 0 all {P} ranks use one version of
      each of {len(weights)} gradients
    - a rank leaves out the weight decay of a tensor: that would be the same in float64, where the
      replicas end {last_in_64:.1g} apart, and not {last:.1g}
    - the ranks begin with different weights: with equal sums they would stay as far apart, and
      {first:.1g} grows to {last:.1g}
    - a rank's gradient is missing in a sum: the replicas are {first:.1g} apart after step 0, and
      a gradient is {logs[0][0]["gradient"].norm():.1g} long
    - a rank reads other samples: all do, and {len(weights) - 1} of {len(weights)} tensors are
      equal on all {P} ranks in the end
    - a bit was flipped on the way: {num_apart} numbers differ in the end
    tensor: is equal on all {P} ranks to the end
    line: does the same to the same numbers on all ranks, or was not executed
    solved: replicas are {first:.1g} apart in {tensor} after step 0, and {last:.1g} in the end, in
      float64 {last_in_64:.1g}
    """
    clues = {"versions": versions, "distances": distances}
    line = "total = total + parts" if in_turns else 'if name in recipe["decayed"]'
    choices = {"tensor": list(weights)}
    answer = {"tensor": tensor, "line": line}
    return case_of(silent.last_bits, P, drawn, text, clues, choices, int(not in_turns), **answer)


def _versions(weights: Mapping[str, Tensor], vectors: list[Tensor]) -> dict[str, int]:
    """The number of different versions of each tensor that the ranks have."""
    by_rank = [_matrices(weights, vector) for vector in vectors]
    versions = {}
    for name in weights:
        versions[name] = len({str(own[name].tolist()) for own in by_rank})
    return versions


def _spread(steps: Sequence[dict[str, Any]]) -> Tensor:
    """Distance by weight between the ranks that are furthest apart in it."""
    values = torch.stack([step["weights"] for step in steps])
    return values.amax(0) - values.amin(0)


def compare_with_one_device(case: Case) -> Comparison:
    """Record two steps of ``tokens`` or ``muon`` on one device and on its ranks, and compare.

    ValueError for another case.
    """
    if "job" not in case.clues:
        raise ValueError(f"{case.program.__name__} has no record: give a case of tokens or muon")
    program, alone, job = case.clues["job"]
    with tempfile.TemporaryDirectory(prefix="labkit-diff-") as folder:
        for size, arguments in ((1, alone), (case.world_size, job)):
            recording = partial(labkit.recording, folder=f"{folder}/{size}")
            gloo = {"world_size": size, "device": "cpu", "transport": "gloo"}
            run(program, *arguments, 2, recording, **gloo)
        return diff_records(f"{folder}/1", f"{folder}/{case.world_size}")
