"""Train on one host and on two, over cables of several rates, and compare with the model.

``make two-hosts`` runs it (root, Linux). In each repeat, at each rate, torchrun starts jobs of 1,
2 and 4 ranks on two hosts, whose contenders take turns. The model computes asleep, as on a
separate device, and has as many parameters as ResNet-18; some contenders train ResNet-18 itself,
too, on the cores that the ranks share.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from namespaces import ADDRESSES, NAMES, TwoHosts
from torch import Tensor, nn

import labkit
from labkit.costs import hosts_all_reduce_seconds
from labkit.costs.ddp_step import bucket_times
from labkit.costs.link import Link, fit_link
from labkit.engine.comm.comm import Comm, SubComm
from labkit.schedules.bucket_assignment import assign_buckets
from labkit.schedules.ring import chunk_bounds
from labkit.strategies.ring_all_reduce import RingAllReduce
from labkit.training.resolve import find_technique
from labkit.workload.layers import EmulatedLayer
from workbook.measure.record import Spread, machine, ratios, rounded, write
from workbook.measure.turns import timed

ROOT = Path(__file__).resolve().parents[1]
RATES: dict[str, float | None] = {"unlimited": None, "10 Gb/s": 10e9, "1 Gb/s": 1e9}
# As in the published run: ResNet-18 for 100 classes, the batch by workers. Computing is 2.7 times
# as slow as there, chosen so that at 1 Gb/s a step weighs about as much. Theirs was PyTorch's DDP.
PARAMETERS, BLOCKS, SAMPLE_S = 11_220_132, 10, 1e-3
BATCHES, COMPUTED_BATCHES = {1: 128, 2: 64, 4: 64}, {1: 16, 2: 8, 4: 8}
COMPUTED = ("one worker", "two on one host", "ring", "hierarchical", "DDP", "PyTorch's DDP")
BUCKET_BYTES, BACKWARD = 25 * 2**20, 2 / 3
PUBLISHED_S = {"one worker": [555.08], "two on one host": [302.00, 324.26]}
PUBLISHED_S["PyTorch's DDP"] = [549.25]
CONTENDERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one worker": (1, "ring_all_reduce", {}),
    "two on one host": (2, "ring_all_reduce", {}),
    "ring": (4, "ring_all_reduce", {}),
    "ring, ranks dealt out": (4, "ring_all_reduce", {}),
    "hierarchical": (4, "ring_all_reduce", {"hierarchical": True}),
    "ring, fp16": (4, "ring_all_reduce", {"compress": "fp16"}),
    "hierarchical, fp16": (4, "ring_all_reduce", {"compress": "fp16", "hierarchical": True}),
    "DDP": (4, "ddp", {}),
    "PyTorch's DDP": (4, "ddp", {}),
}
BLOCK_SIZES = [end - start for start, end in chunk_bounds(PARAMETERS, BLOCKS)]
MESSAGE_BYTES, MESSAGE_REPEATS = (2**20, 2**22, 2**23, 2**24), 5
MEASURED = ((4, "between"), (4, "inside"), (2, "between"))
ANSWER = "two hosts: "
# The first bytes, in which TCP finds its window, do not count.
RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
buffer, num_bytes, first_s = bytearray(1 << 20), 0, time.perf_counter()
while count := connection.recv_into(buffer):
    if time.perf_counter() - first_s < 0.1:
        start_s = time.perf_counter()
    else:
        num_bytes += count
print(num_bytes / (time.perf_counter() - start_s))
"""
SEND = """
import socket, sys, time
start_s = time.perf_counter()
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while time.perf_counter() - start_s < 0.6:
        connection.sendall(bytes(1 << 18))
"""


class Weights(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.weight.square().mean()


def be_a_rank(comm: Comm) -> None:
    """One turn of every contender of this size, then messages; rank 0 prints what it measured."""
    torch.set_num_threads(1)  # as on a separate device
    blocks = [nn.Sequential(EmulatedLayer(SAMPLE_S / BLOCKS), Weights(n)) for n in BLOCK_SIZES]
    model, P = nn.Sequential(*blocks), comm.world_size
    resnet = labkit.build_model("resnet18", num_classes=100, input_shape=(3, 32, 32), seed=0)
    asleep = torch.randn(BATCHES[P], 10), torch.zeros(BATCHES[P], dtype=torch.long)
    images = torch.randn(COMPUTED_BATCHES[P], 3, 32, 32), asleep[1][: COMPUTED_BATCHES[P]]
    found: dict[str, Any] = {"steps": {}, "local_s": {}, "computed_steps": {}, "links": {}}
    for name, (ranks, *_) in CONTENDERS.items():
        if ranks == P:
            found["steps"][name], found["local_s"][name] = one_step(comm, name, model, *asleep)
        if ranks == P and name in COMPUTED:
            found["computed_steps"][name], _ = one_step(comm, name, resnet, *images)
    if P > 1:
        right, left, partner = (comm.rank + 1) % P, (comm.rank - 1) % P, comm.rank ^ 1
        seconds = defaultdict(list)
        for size in MESSAGE_BYTES * MESSAGE_REPEATS:
            out, landing = torch.ones(size // 4), torch.empty(size // 4)
            for way, action in (
                ("between", partial(comm.exchange, out, right, landing, left)),
                ("inside", partial(comm.exchange, out, partner, landing, partner)),
                ("add", partial(landing.add_, out)),
            ):
                seconds[way].append(slowest(comm, action))
        found["links"] = seconds
    if comm.rank == 0:
        print(f"{ANSWER}{json.dumps(found)}", flush=True)


def one_step(
    comm: Comm, name: str, model: nn.Module, inputs: Tensor, targets: Tensor
) -> tuple[float, dict[str, float]]:
    """Seconds of a contender's third step, and those of this rank's own parts of it.

    In its second step PyTorch's DDP lays out its buckets.
    """
    _, kind, options = CONTENDERS[name]
    strategy = find_technique(kind, builtin=name.startswith("PyTorch"))(**options)
    # Ranks that are dealt out to the hosts in turn: every message of the ring crosses.
    own = SubComm(comm, [0, 2, 1, 3]) if "dealt out" in name else comm
    # The hooks of others on the parameters would run for all.
    mine = model if isinstance(strategy, RingAllReduce) else copy.deepcopy(model)
    strategy.setup(own, mine, partial(torch.optim.SGD, lr=1e-3))
    step = partial(strategy.step, inputs, targets, len(inputs) * comm.world_size)
    step()
    step()
    before = len(comm.session.spans())
    seconds = slowest(comm, step)
    spent_s = labkit.Trace(comm.session.spans()[before:]).seconds_by_kind(lane=0)
    return seconds, {k: spent_s.get(k, 0) for k in ("compute", "update", "compress")}


def slowest(comm: Comm, action: Callable[[], object]) -> float:
    seconds = torch.tensor([timed(comm, action)], dtype=torch.float64)
    return labkit.collectives.tree_all_reduce(comm, seconds, "max").item()


def job(hosts: TwoHosts, ranks: int, port: int) -> dict[str, Any]:
    num_hosts, agents = (1 if ranks <= 2 else 2), []
    for host in range(num_hosts):
        words = ["--nnodes", str(num_hosts), "--node-rank", str(host), "--master-addr", NAMES[0]]
        words += ["--master-port", str(port), "--nproc-per-node", str(ranks // num_hosts)]
        command = [sys.executable, "-m", "torch.distributed.run", *words, __file__, "--rank"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        agents.append(hosts.popen(host, command, env=env, text=True, **pipes))
    said = [agent.communicate()[0] for agent in agents]
    answers = [line for line in said[0].splitlines() if line.startswith(ANSWER)]
    if not answers or any(agent.returncode for agent in agents):
        raise RuntimeError("\n".join(["the ranks on the two hosts have failed", *said]))
    return json.loads(answers[0].removeprefix(ANSWER))


def raw_bytes_per_s(hosts: TwoHosts) -> float:
    python = [sys.executable, "-I", "-S", "-c"]
    receive = [*python, RECEIVE, ADDRESSES[0]]
    with hosts.popen(0, receive, stdout=subprocess.PIPE, text=True) as receiver:
        port = receiver.stdout.readline().strip()
        hosts.run(1, *python, SEND, ADDRESSES[0], port)
        return float(receiver.stdout.read())


def sync_s(name: str, num_bytes: float, inside: Link, between: Link) -> float:
    """Predicted seconds to sum gradients of so many bytes as this contender does."""
    ranks, _, options = CONTENDERS[name]
    hosts = {1: ((0,),), 2: ((0, 1),), 4: ((0, 1), (2, 3))}[ranks]
    hosts = ((0, 2), (1, 3)) if name.endswith("dealt out") else hosts
    compress, hierarchical = options.get("compress"), options.get("hierarchical")
    if hierarchical and compress:  # only what crosses the cable
        between = replace(between, beta_s_per_byte=between.beta_s_per_byte / 2)
    num_bytes = num_bytes / 2 if compress and not hierarchical else num_bytes
    algorithm = "hierarchical" if hierarchical else "ring"
    return hosts_all_reduce_seconds(algorithm, num_bytes, hosts, inside, between)


def step_s(name: str, local_s: dict[str, float], inside: Link, between: Link) -> float:
    """Predicted; DDP sums each bucket as soon as it has its gradients."""
    if CONTENDERS[name][1] != "ddp":
        return sum(local_s.values()) + sync_s(name, 4 * PARAMETERS, inside, between)
    sizes, backward_s = [4 * n for n in BLOCK_SIZES], BACKWARD * local_s["compute"]
    ready_s = [backward_s * (BLOCKS - 1 - block) / BLOCKS for block in range(BLOCKS)]
    buckets = assign_buckets(sizes, BUCKET_BYTES)
    reduce_s = [sync_s(name, sum(sizes[b] for b in one), inside, between) for one in buckets]
    end_s = max(time.end_s for time in bucket_times(buckets, ready_s, reduce_s))
    return local_s["compute"] - backward_s + max(backward_s, end_s) + local_s["update"]


def measure(hosts: TwoHosts, repeats: int) -> dict[str, Any]:
    jobs: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    raw, port = {}, 29400
    for _ in range(repeats):
        for rate, bits_per_s in RATES.items():
            hosts.set_rate(bits_per_s)
            raw.setdefault(rate, raw_bytes_per_s(hosts))
            for ranks in BATCHES:
                port += 1
                jobs[rate, ranks].append(job(hosts, ranks, port))

    def link(rate: str, ranks: int, way: str) -> Link:
        seconds = [one["links"] for one in jobs[rate, ranks]]
        sizes = MESSAGE_BYTES * MESSAGE_REPEATS * repeats
        both = ([one for s in seconds for one in s[kind]] for kind in (way, "add"))
        found, adding = (fit_link(sizes, one) for one in both)
        return Link(found.alpha_s, found.beta_s_per_byte, adding.beta_s_per_byte)

    def row_of(kind: str, batches: dict[int, int], rate: str, name: str) -> dict[str, Any]:
        """What was measured; speed-ups are those in samples per second, in the same repeat."""
        P = CONTENDERS[name][0]
        alone, seconds = (
            [one[kind][who] for one in jobs[rate, ranks]]
            for who, ranks in (("one worker", 1), (name, P))
        )
        share = P * batches[P] / batches[1]
        speed_up = Spread.of([share * one for one in ratios(alone, seconds)])
        row = {"rate": rate, "contender": name, "workers": P, "hosts": max(1, P // 2)}
        row |= {"samples": P * batches[P], "seconds": rounded(seconds)}
        row |= {"step_s": asdict(Spread.of(seconds)), "speed_up": asdict(speed_up)}
        return row | {"efficiency": speed_up.median / P}

    links, steps, computed = [], [], []
    for rate, bits_per_s in RATES.items():
        between, inside, one_host = (link(rate, *of) for of in MEASURED)
        alone_s = 0.0
        cable = {"between": between, "inside": inside, "one_host": one_host}
        own = {"rate": rate, "bits_per_s": bits_per_s, "raw_bytes_per_s": raw[rate]}
        links.append(own | {name: asdict(one) for name, one in cable.items()})
        for name, (P, *_) in CONTENDERS.items():
            free = [one["local_s"][name] for one in jobs["unlimited", P]]
            local_s = {k: statistics.median(one[k] for one in free) for k in free[0]}
            model_s = step_s(name, local_s, one_host if P == 2 else inside, between)
            alone_s = alone_s or model_s
            row = row_of("steps", BATCHES, rate, name) | {"local_s": local_s, "model_s": model_s}
            row["model_speed_up"] = alone_s / model_s * P * BATCHES[P] / BATCHES[1]
            published = [PUBLISHED_S["one worker"][0] / s for s in PUBLISHED_S.get(name, [])]
            steps.append(row | ({"published_speed_up": published} if published else {}))
        computed += [row_of("computed_steps", COMPUTED_BATCHES, rate, name) for name in COMPUTED]
    measured = {"links": links, "steps": steps, "real_steps": computed}
    return {"parameters": PARAMETERS} | measured


def main() -> None:
    if "WORLD_SIZE" in os.environ and "--rank" in sys.argv:
        labkit.run(be_a_rank, world_size=int(os.environ["WORLD_SIZE"]), device="cpu")
        return
    parser = argparse.ArgumentParser(
        description="Train on one host and on two, over cables of several rates."
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="data/results/two_hosts", help="FILE without its ending")
    given = parser.parse_args()
    with TwoHosts() as hosts:
        found = measure(hosts, given.repeats)
    from workbook.measure import two_hosts

    print(two_hosts.two_hosts_table(found["steps"] + found["real_steps"]))
    how = {"command": "make two-hosts", "config": {"repeats": given.repeats}}
    write(how | found | machine(), f"{given.out}.json")


if __name__ == "__main__":
    main()
