"""The broken jobs of page 15, run on real ranks: each leaves a ``Case`` to solve.

The rank at fault, its step and the size of the fault are drawn with ``seed``, anew in each run.
The evidence against a wrong answer is made from the results of the run. Symbols: P ranks.
"""

import itertools
import json
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _dump_fr_trace_json

from labkit import EmulatedLink, RunResult, load_dataset, run
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import Card
from workbook.exercises.cases import Case, case_of, seeded
from workbook.exercises.detective import entries_in
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.programs import jobs

_TIMEOUT_S = 1.0


def mismatch(seed: int | None = None) -> Case:
    """Clues, by rank: ``losses`` [STEPS, B], ``errors``, and flight recorder ``dumps``."""
    seed, drawn = seeded(seed)
    P = 3
    steps = 9
    rank = drawn.randrange(P)
    step = drawn.randrange(3, steps - 1)
    losses = random_tensor(seed, P, steps, 8).abs().clamp(max=0.9 * jobs.HARD)
    losses[rank, step, drawn.randrange(8)] = 1.5 * jobs.HARD
    result = run(_until_timeout, losses, world_size=P, device="cpu", transport="gloo")
    errors = {r: error for r, (error, _) in enumerate(result.values)}
    dumps = {r: entries for r, (_, entries) in enumerate(result.values)}
    newest = dumps[rank][-1]
    usual = dumps[(rank + 1) % P][-1]["profiling_name"]
    name = newest["profiling_name"]
    number = newest["collective_seq_id"]
    each_ms = 1000 * max(0.0, result.duration_s - _TIMEOUT_S) / (number - 1)
    text = f"""
    - a rank calls a collective only if its own data ask for it
    - a rank has ended early: the newest entry of every rank has the number {number}
    - a rank is slow: the others waited for {_TIMEOUT_S:g} s, and at most {each_ms:.0f} ms before
    - the connection between two ranks is lost: then the entries {number} would have one name
    - the ranks bring tensors of different sizes: all bring {newest["input_sizes"]} in the end
    - a loss is not a number: the largest of all losses is {losses.max():.2f}
    rank: calls {usual} in the end, as most ranks do
    number: is not the first with different names on different ranks
    line: is not where rank {rank} stands: its newest entry is {name}
    solved: collective {number} is {name} on rank {rank}, whose loss is above {jobs.HARD:g}, and
      {usual} on the others
    """
    clues = {"losses": losses, "errors": errors, "dumps": dumps}
    answer = {"rank": rank, "number": number, "line": "dist.all_gather"}
    return case_of(jobs.mismatch, P, drawn, text, clues, **answer)


def _until_timeout(comm: Comm, losses: Tensor) -> tuple[str, list[dict[str, Any]]]:
    """The error that ends the job on this rank, and the entries of its flight recorder."""
    group: Any = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_S))
    error = ""
    try:
        jobs.mismatch(losses[comm.rank], group)
    except RuntimeError as raised:
        error = str(raised).rpartition("] ")[2]
    return error, entries_in(_dump_fr_trace_json(True, False), group.group_name)


def drift(seed: int | None = None) -> Case:
    """Clues: ``losses`` and ``checksums``, {rank: one by step}; a checksum is {name: number}."""
    seed, drawn = seeded(seed)
    P = 4
    steps = 8
    rank, other = drawn.sample(range(P), 2)
    early, step = sorted(drawn.sample(range(2, steps - 1), 2))
    x = random_tensor(seed, P, steps, 16, 6)
    y = x.sum(-1, keepdim=True)
    # Two ranks have a bad batch; only one is so bad that its rank leaves out the update.
    y[rank, step] += 15
    y[other, early] += 6
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    result = run(jobs.drift, model, x, y, world_size=P, device="cpu")
    losses = _logs(result, "loss")
    checksums = _logs(result, "checksums")
    weights = _logs(result, "weights")
    after = (weights[rank][step] - weights[other][step]).abs().max()
    end = (weights[rank][-1] - weights[other][-1]).abs().max()
    text = f"""
    - a rank leaves out an update because of its own loss
    - the ranks begin with different parameters: up to step {step - 1} all checksums are equal
    - the ranks add up in different orders: that changes the last bits, and this is {after:.2g}
    - a parameter is left out of the all-reduce: {P - 1} ranks have equal checksums to the end
    - a rank has another learning rate: it is off by {after:.3g} at first, {end:.3g} at the end
    - a rank reads other samples: all do, and up to step {step - 1} their checksums are equal
    rank: has the checksums of most ranks to the end
    step: is not the first after which checksums differ: those of steps 0 to {step - 1} are equal
    line: does not decide it: after step {step} rank {rank} has the checksums of step {step - 1}
    solved: rank {rank} has a loss of {losses[rank][step]:.0f} in step {step}: it takes part in the
      average, and is the only one that is not updated with it
    """
    clues = {"losses": losses, "checksums": checksums}
    answer = {"rank": rank, "step": step, "line": "if loss < SPOILT"}
    return case_of(jobs.drift, P, drawn, text, clues, **answer)


def straggler(seed: int | None = None) -> Case:
    """Clues: the ``run``; ``lengths`` {rank: tokens by step}."""
    _, drawn = seeded(seed)
    P = 3
    steps = 6
    usual = 60
    rank = drawn.randrange(P)
    is_text = drawn.random() < 0.5
    tokens = P * [usual]  # in each sequence, by rank
    if not is_text:
        tokens[rank] = 4 * usual
    lengths = {r: steps * [length] for r, length in enumerate(tokens)}
    shards: list[list[Any]] = [[torch.rand(n, jobs.WIDTH) for n in lengths[r]] for r in range(P)]
    if is_text:
        shards[rank] = [json.dumps(sequence.tolist()) for sequence in shards[rank]]
    result = run(jobs.straggler, shards, world_size=P, device="cpu")
    text = f"""
    - a rank has longer sequences: all have {usual} tokens
    - a rank reads text: reading takes {_ms(result, "data")} ms
    - the core of a rank is slow: {steps} times {tokens} tokens take {_ms(result, "compute")} ms
    - a rank sends more: each sends {result.bytes_sent[0]} bytes
    - a rank has more sequences: each has {steps}
    - the first step is slow, as always: it is one of {steps}, and all are alike
    rank: is not the last: ranks 0 to {P - 1} work for {_ms(result, "data", "compute")} ms
    line: takes as long on the other ranks, or next to no time
    solved: rank {rank} is the last, and in each step all others wait for it
    """
    clues = {"run": result, "lengths": lengths}
    line = "json.loads" if is_text else "rnn(sequence"
    answer = {"rank": rank, "line": line}
    return case_of(jobs.straggler, P, drawn, text, clues, right=int(is_text), **answer)


def divisor(seed: int | None = None) -> Case:
    """Clues: ``recipe``; ``losses`` by step; ``lengths`` of gradients in step 0."""
    seed, drawn = seeded(seed)
    P = drawn.randint(2, 4)
    parts = drawn.randint(2, 3)
    size = 4
    steps = 12
    counts = {"micro_batches": parts, "ranks": P}
    wrong, other = drawn.sample(list(counts), 2)
    recipe = {"size": size} | counts
    recipe[wrong] = drawn.choice([n for n in (1, 2, 3, 4, 8) if n != counts[wrong]])
    x = random_tensor(seed, steps, P * parts * size, 6)
    y = x.sum(-1, keepdim=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    result = run(jobs.divisor, model, x, y, recipe, world_size=P, device="cpu")
    alone = {"size": P * parts * size, "micro_batches": 1, "ranks": 1}
    (device,) = run(jobs.divisor, model, x, y, alone, world_size=1, device="cpu").values
    local = torch.stack([log[0]["own"] for log in result.values]).mean(0)
    used = result.values[0][0]["gradient"]
    right = device[0]["gradient"]
    local_factor = local.norm().item() / right.norm().item()
    factor = used.norm().item() / right.norm().item()
    cosine = nn.functional.cosine_similarity(used, right, 0)
    states = len({str(log[-1]["checksums"]) for log in result.values})
    nouns = {"ranks": "gradients of the ranks", "micro_batches": "losses of micro-batches"}
    text = f"""
    - the {nouns[wrong]} are divided by another number than there are
    - the {nouns[other]} are divided by another number than there are: the mean of the ranks' own
      gradients is {local_factor:.3g} times as long as one device's, and what is used
      {factor:.3g} times
    - a rank's gradient is missing: what is used has one device's direction (cosine {cosine:.4f})
    - the ranks' shares are not equal: each has {parts * size} samples of a step
    - the learning rate does not suit the batch: before it is used, the factor is {factor:.3g}
    - the replicas have drifted apart: the {P} ranks end with {states} set of checksums
    factor: is not the length of what was used / that of one device
    line: does not make the gradient {factor:.3g} times as long
    solved: {wrong} is {recipe[wrong]} in the recipe, and there are {counts[wrong]}: all gradients
      are {factor:.3g} times as long as on one device, as with another learning rate
    """
    mean = torch.tensor([*_logs(result, "loss").values()]).mean(0).tolist()
    losses = {f"{P} ranks": mean, "one device": [step["loss"] for step in device]}
    gradients = {"mean of the ranks' own": local, "used": used, "one device": right}
    lengths = {name: gradient.norm().item() for name, gradient in gradients.items()}
    clues = {"recipe": recipe, "losses": losses, "lengths": lengths}
    return case_of(jobs.divisor, P, drawn, text, clues, factor=factor, line=f'recipe["{wrong}"]')


def sampler(seed: int | None = None) -> Case:
    """Clues: ``size``; ``read`` {rank: numbers by epoch}; how many are ``seen`` in each epoch."""
    seed, drawn = seeded(seed)
    P = drawn.randint(3, 4)
    epochs = 3
    size = 24 * P
    rank = drawn.randrange(P)
    other = (rank + 1) % P
    result = run(jobs.sampler, range(size), seed, epochs, rank, world_size=P, device="cpu")
    read = dict(enumerate(result.values))
    seen = [len(set(itertools.chain(*parts))) for parts in zip(*result.values)]
    text = f"""
    - one rank alone tells its sampler the epoch
    - no rank tells its sampler the epoch: rank {rank} begins with {read[rank][0][:3]}, then with
      {read[rank][1][:3]}
    - the samples do not divide by the ranks: {size} / {P} = {size / P:g}
    - the samplers have different seeds: in epoch 0 all {seen[0]} samples are read
    - the order is not shuffled: rank {other} begins with {read[other][0][:4]}
    - a rank has only a part of the data: {seen[0]} of {size} samples are read in epoch 0
    rank: has one order for all {epochs} epochs
    missed: is not {size} less the different samples that all ranks read in the last epoch
    line: is executed by all ranks, or need not be
    solved: rank {rank} alone has a new order in each epoch, so its share overlaps with those of
      the others: {size - seen[-1]} of {size} samples are missed in the last epoch
    """
    clues = {"size": size, "read": read, "seen": seen}
    answer = {"rank": rank, "missed": size - seen[-1], "line": "set_epoch"}
    return case_of(jobs.sampler, P, drawn, text, clues, **answer)


def buffers(seed: int | None = None) -> Case:
    """Clues, by rank: ``accuracy``, ``losses``, and the ``checksums`` of the last step."""
    seed, drawn = seeded(seed)
    P = 3
    steps = 30
    size = 40
    rank, other = drawn.sample(range(P), 2)
    digits = load_dataset("digits")
    held_out = (digits.test_inputs.flatten(1), digits.test_targets)
    chosen = random_tensor(seed, P, steps, len(digits.train_targets)).argsort()[..., :size]
    inputs = digits.train_inputs.flatten(1)[chosen]
    targets = digits.train_targets[chosen]
    inputs[rank] += 2  # a camera that makes brighter images
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    result = run(jobs.buffers, model, inputs, targets, held_out, world_size=P, device="cpu")
    accuracy = {r: log.pop()["accuracy"] for r, log in enumerate(result.values)}
    good = accuracy[other]
    losses = _logs(result, "loss")
    checksums = {r: by_step[-1] for r, by_step in _logs(result, "checksums").items()}
    names = [name for name, _ in model.named_parameters()]
    buffer_names = ", ".join(name for name, _ in model.named_buffers())
    equal = 0
    for name in names:
        equal += len({checksums[r][name] for r in range(P)}) == 1
    text = f"""
    - each replica has running statistics of its own samples alone
    - the parameters have drifted apart: {equal} of {len(names)} are equal on all ranks
    - a replica has overfitted: rank {other} gets {good:.0%} right with the same parameters
    - a rank has wrong labels: its loss ends at {losses[rank][-1]:.2f}, that of rank {other} at
      {losses[other][-1]:.2f}
    - the ranks are tested on different samples: all on the same {len(held_out[1])}
    - the batches are too small for BatchNorm: all have {size}, rank {other} with {good:.0%} right
    rank: is among the best, with {good:.0%} right or nearly so
    buffer: is not the first that differs of {buffer_names}
    line: changes nothing, or what all ranks change alike
    solved: nothing averages the buffers, and rank {rank} has those of a brighter camera: it gets
      {accuracy[rank]:.0%} right in place of {good:.0%}
    """
    clues = {"accuracy": accuracy, "losses": losses, "checksums": checksums}
    answer = {"rank": rank, "buffer": "1.running_mean", "line": "model(x)"}
    choices = {"buffer": list(model.state_dict())}
    return case_of(jobs.buffers, P, drawn, text, clues, choices, **answer)


def link(seed: int | None = None) -> Case:
    """Clues: ``ms`` of single messages, {(from, to, bytes): ms}; the ``run``."""
    _, drawn = seeded(seed)
    P = 4
    steps = 3
    few = 4
    many = 400_000
    first = drawn.randrange(P)
    is_late = drawn.random() < 0.5
    pair = {first, (first + 1) % P}
    slow = EmulatedLink(0.02) if is_late else EmulatedLink(0.0, 10e6)
    result = run(_over_slow_link, pair, slow, steps, (few, many), world_size=P, device="cpu")
    ms = {}
    for ms_of_rank in result.values:
        ms |= ms_of_rank
    a, b = sorted(pair)
    c, d = sorted({*range(P)} - pair)
    small = ms[a, b, few]
    large = ms[a, b, many]
    causes = ["a link has less bandwidth", "a link has a longer latency"]
    innocent = [
        f"there {many} bytes take {large:.0f} ms, and {few} bytes {small:.0f} ms as well",
        f"there {few} bytes take {small:.1f} ms, between {c} and {d} {ms[c, d, few]:.1f} ms",
    ]
    text = f"""
    - {causes[is_late]}
    - {causes[not is_late]}: {innocent[not is_late]}
    - all links are slow: {many} bytes take {ms[c, d, many]:.1f} ms from {c} to {d}
    - the network card of a rank is slow: {many} bytes take {ms[a, c, many]:.1f} ms from {a} to
      {c}, and {ms[d, b, many]:.1f} ms from {d} to {b}
    - a rank computes slowly: ranks 0 to {P - 1} compute for {_ms(result, "compute")} ms
    - a rank sends more than the others: each sends {result.bytes_sent[0]} bytes
    between: is not the link on which {many} bytes take {large:.0f} ms
    solved: between {a} and {b} {few} bytes take {small:.1f} ms and {many} {large:.0f} ms, between
      {c} and {d} {ms[c, d, few]:.1f} and {ms[c, d, many]:.1f} ms: {causes[is_late]}
    """
    return case_of(jobs.link, P, drawn, text, {"run": result, "ms": ms}, between=[a, b])


def _over_slow_link(
    comm: Comm, pair: set[int], slow: EmulatedLink, steps: int, sizes: tuple[int, ...]
) -> dict[tuple[int, int, int], float]:
    """Run the job with a slow link between a pair of ranks, then send single messages."""
    near = frozenset(range(comm.world_size)) - (pair if comm.rank in pair else set())
    comm.transport.carry = partial(Card(slow).carry, near)
    comm.transport.shares_memory = False
    jobs.link(comm, torch.rand(100_000), steps)
    return jobs.probe(comm, sizes)


def _logs(result: RunResult, key: str) -> dict[int, list[Any]]:
    """The entries that the ranks have logged under ``key``, {rank: one by step}."""
    logs = {}
    for rank, log in enumerate(result.values):
        logs[rank] = [step[key] for step in log]
    return logs


def _ms(result: RunResult, *kinds: str) -> str:
    """Milliseconds by rank of work of these kinds in the whole run."""
    numbers = []
    for rank in range(len(result.values)):
        seconds = result.trace.seconds_by_kind(rank)
        numbers.append(f"{1000 * sum(seconds[kind] for kind in kinds):.1f}")
    return ", ".join(numbers)
