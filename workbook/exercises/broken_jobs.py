"""The broken jobs of page 13, run on real ranks: each leaves a ``Case`` to solve.

Who is at fault, when and by how much is drawn with ``seed``, anew in each run. What is said
against a wrong answer is made from what the run has left. Symbols: P ranks.
"""

import itertools
import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json

from labkit import RunResult, run
from labkit.comm.comm import Comm
from workbook.exercises.cases import Case, case_of
from workbook.exercises.detective import entries_in
from workbook.exercises.grader.exercise import new_seed, random_tensor
from workbook.exercises.programs import jobs

_TIMEOUT_S = 1.0


def mismatch(seed: int | None = None) -> Case:
    """A job of plain PyTorch in which one rank calls another collective than the others.

    Clues, by rank: ``losses`` [STEPS, B], ``errors``, and the flight recorders' ``dumps``.
    """
    seed, drawn = _seeded(seed)
    P, steps = 3, 9
    rank, step = drawn.randrange(P), drawn.randrange(3, steps - 1)
    losses = random_tensor(seed, P, steps, 8).abs().clamp(max=0.9 * jobs.HARD)
    losses[rank, step, drawn.randrange(8)] = 1.5 * jobs.HARD
    result = run(_until_timeout, losses, world_size=P, device="cpu", transport="gloo")
    errors, dumps = (dict(enumerate(by_rank)) for by_rank in zip(*result.values))
    newest, usual = dumps[rank][-1], dumps[(rank + 1) % P][-1]["profiling_name"]
    name, number = newest["profiling_name"], newest["collective_seq_id"]
    each_ms = 1000 * max(0.0, result.duration_s - _TIMEOUT_S) / (number - 1)
    text = f"""
    - a rank calls a collective only if its own data ask for it
    - a rank has ended early: the newest entry of each rank has the number {number}, so all have
      come equally far
    - a rank is slow, and the timeout too short: the others waited {_TIMEOUT_S:g} s for collective
      {number}, and each of the {number - 1} before it took {each_ms:.0f} ms at most
    - the connection between two ranks is lost: then a rank would read "Connection closed by
      peer", and here all {P} have timed out
    - the ranks bring tensors of different sizes: in collective {number} all have
      {newest["input_sizes"]}; what differs is the name
    - a loss is not a number: the largest of all losses is {losses.max():.2f}
    rank: calls {usual} in the end, as most ranks do
    number: is not the first with different names on different ranks
    line: is not where rank {rank} stands: its newest entry is {name}
    solved: collective {number} is {name} on rank {rank}, which has a loss above {jobs.HARD:g}
      there, and {usual} on the others
    """
    clues = {"losses": losses, "errors": errors, "dumps": dumps}
    answer = {"rank": rank, "number": number, "line": "dist.all_gather"}
    return case_of(jobs.mismatch, result, drawn, clues, answer, text)


def _until_timeout(comm: Comm, losses: torch.Tensor) -> tuple[str, list[dict[str, Any]]]:
    """The error that ends the job on this rank, and the entries of its flight recorder."""
    group: Any = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_S))
    error = ""
    try:
        jobs.mismatch(losses[comm.rank], group)
    except RuntimeError as raised:
        error = str(raised).rpartition("] ")[2]
    return error, entries_in(_dump_fr_trace_json(True, False), group.group_name)


def drift(seed: int | None = None) -> Case:
    """Replicas that differ from the step on in which one of them is not updated.

    Clues: ``losses`` and ``checksums``, {rank: one by step}; a checksum is {name: number}.
    """
    seed, drawn = _seeded(seed)
    P, steps = 4, 8
    rank, other = drawn.sample(range(P), 2)
    early, step = sorted(drawn.sample(range(2, steps - 1), 2))
    x = random_tensor(seed, P, steps, 16, 6)
    y = x.sum(-1, keepdim=True) + 0.1 * random_tensor(seed + 1, P, steps, 16, 1)
    # Two ranks have a bad batch; only one is so bad that its rank leaves out the update.
    y[rank, step] += 15
    y[other, early] += 6
    batches = [list(zip(*of_rank)) for of_rank in zip(x, y)]
    result = run(jobs.drift, _model(seed, 6, 8, 1), batches, world_size=P, device="cpu")
    losses, checksums, states = (_by_rank(result, key) for key in ("loss", "checksums", "state"))
    after, end = (
        max((states[rank][now][key] - one).abs().max() for key, one in states[other][now].items())
        for now in (step, -1)
    )
    text = f"""
    - a rank leaves out an update because of its own loss
    - the ranks begin with different parameters: up to step {step - 1} all checksums are equal
    - the ranks add up in different orders: that changes a parameter by 1e-7 of itself, and after
      step {step} one differs by {after:.2g}
    - a parameter is left out of the all-reduce: then no two ranks would agree, and {P - 1} of them
      have equal checksums to the end
    - the learning rate of a rank is another one: two ranks are {after:.3g} apart after step {step}
      and {end:.3g} at the end, so their other updates are equal
    - a rank reads other samples than the rest: all of them do, and all use the average of the
      gradients; up to step {step - 1} their checksums are equal all the same
    rank: has the checksums of most ranks to the end
    step: is not the first after which the checksums differ; rank {other} has a loss of
      {losses[other][early]:.0f} in step {early} and stays with the others
    line: does not decide it: after step {step} rank {rank} has the checksums of step {step - 1}
    solved: rank {rank} has a loss of {losses[rank][step]:.0f} in step {step}: it adds its gradient
      to the average, and is the only one that is not updated with it
    """
    clues = {"losses": losses, "checksums": checksums}
    answer = {"rank": rank, "step": step, "line": "if loss < SPOILT"}
    return case_of(jobs.drift, result, drawn, clues, answer, text)


def divisor(seed: int | None = None) -> Case:
    """Gradients divided by numbers from a recipe for other ranks or micro-batches.

    Clues: ``recipe``; ``losses`` by step, of the ranks and of one device; ``lengths`` of the
    gradients in step 0: the mean of the ranks' own, what the update takes, that of one device.
    """
    seed, drawn = _seeded(seed)
    P, parts, size, steps = drawn.randint(2, 4), drawn.randint(2, 3), 4, 12
    there = {"micro_batches": parts, "ranks": P}
    recipe = {"size": size} | there
    wrong, other = drawn.sample(("micro_batches", "ranks"), 2)
    recipe[wrong] = drawn.choice([n for n in (1, 2, 3, 4, 8) if n != recipe[wrong]])
    batch = P * parts * size
    x = random_tensor(seed, steps, batch, 6)
    given = _model(seed, 6, 8, 1), list(zip(x, x.sum(-1, keepdim=True)))
    result = run(jobs.divisor, *given, recipe, world_size=P, device="cpu")
    whole = {"size": batch, "micro_batches": 1, "ranks": 1}
    (alone,) = run(jobs.divisor, *given, whole, world_size=1, device="cpu").values
    own = torch.stack([log[0]["own"] for log in result.values]).mean(0)
    used, right = result.values[0][0]["used"], alone[0]["used"]
    lengths = {"mean of the ranks' own": own, "used": used, "one device": right}
    lengths = {name: one.norm().item() for name, one in lengths.items()}
    of_own, factor = (lengths[name] / lengths["one device"] for name in [*lengths][:2])
    cosine = nn.functional.cosine_similarity(used, right, 0)
    states = len({str(log[-1]["checksums"]) for log in result.values})
    summands = {"ranks": "gradients of the ranks", "micro_batches": "losses of micro-batches"}
    text = f"""
    - the {summands[wrong]} are divided by another number than there are
    - the {summands[other]} are divided by another number than there are: the mean of the ranks'
      own gradients is {of_own:.3g} times as long as one device's, what is used {factor:.3g} times
    - the gradient of a rank is missing in the sum: what is used has the direction of one device's
      gradient (their cosine is {cosine:.4f}), and another length
    - the ranks' shares are not equal: each has {batch // P} of the {batch} samples of a step
    - the learning rate does not suit the batch: the gradient of step 0 is {factor:.3g} times as
      long as one device's, before any learning rate is used
    - the replicas have drifted apart: the {P} ranks end with {states} set of checksums
    factor: is not the length of what was used / that of one device
    line: does not make the gradient {factor:.3g} times as long
    solved: {wrong} is {recipe[wrong]} in the recipe, and {there[wrong]} is right:
      each gradient is {factor:.3g} times as long as on one device, as with another learning rate
    """
    mean = torch.tensor([*_by_rank(result, "loss").values()]).mean(0).tolist()
    losses = {f"{P} ranks": mean, "one device": [step["loss"] for step in alone]}
    clues = {"recipe": recipe, "losses": losses, "lengths": lengths}
    answer = {"factor": factor, "line": f'recipe["{wrong}"]'}
    return case_of(jobs.divisor, result, drawn, clues, answer, text)


def _seeded(seed: int | None) -> tuple[int, random.Random]:
    seed = new_seed() if seed is None else seed
    return seed, random.Random(seed)


def _model(seed: int, *sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(D, E) for D, E in itertools.pairwise(sizes)]
    return nn.Sequential(*[one for layer in layers for one in (layer, nn.Tanh())][:-1])


def _by_rank(result: RunResult, key: str) -> dict[int, list[Any]]:
    """What the ranks have logged under ``key``, {rank: one by step}."""
    return {rank: [step[key] for step in log] for rank, log in enumerate(result.values)}
