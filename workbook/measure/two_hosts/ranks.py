"""The program of the ranks on the two hosts, which ``torchrun`` starts: it takes turns as told.

A line on the standard input of rank 0 names a turn, and the answer is a line of JSON on its
standard output: the seconds of the slowest rank, and what rank 0 did in them.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import labkit
from labkit import collectives, strategies
from labkit.comm.comm import Comm, SubComm
from labkit.strategies.ring_all_reduce import RingAllReduce
from workbook.measure import model_step
from workbook.measure.turns import timed
from workbook.measure.two_hosts import work
from workbook.measure.two_hosts.model import dealt_out_order

_TIMEOUT_S = 3600.0
_LONGEST_LINE = 256

Action = Callable[[], object]


def main() -> None:
    """Be one of torchrun's ranks."""
    ranks = int(os.environ["WORLD_SIZE"])
    labkit.run(serve, world_size=ranks, device="cpu", timeout_s=_TIMEOUT_S)


def serve(comm: Comm) -> None:
    """Take the turns that rank 0 is told, until its standard input ends."""
    # As on a device of its own: a worker that is alone gets no second core of this machine.
    torch.set_num_threads(1)
    turns = Turns(comm)
    _answer(comm, {"ready": comm.world_size})
    while words := _told(comm):
        kind, _, name = words.partition(" ")
        action = turns.action(kind, name)
        before = _seconds_by_kind(comm)
        seconds = torch.tensor([timed(comm, action)], dtype=torch.float64)
        after = _seconds_by_kind(comm)
        spent = {name: after[name] - before.get(name, 0.0) for name in after}
        slowest = collectives.tree_all_reduce(comm, seconds, "max").item()
        _answer(comm, {"seconds": slowest, "spent_s": spent})


class Turns:
    """What this rank does in each turn; made when a turn comes for the first time."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self._actions: dict[tuple[str, str], Action] = {}
        # One for all contenders that leave it as it is.
        self._emulated = work.emulated_model()

    def action(self, kind: str, name: str) -> Action:
        """One step, message or all-reduce, by its kind and name."""
        make = {
            "train": self._step,
            "resnet18": self._real_step,
            "message": self._message,
            "inside": self._message_inside,
            "add": self._addition,
            "all-reduce": self._all_reduce,
        }[kind]
        if (kind, name) not in self._actions:
            self._actions[kind, name] = make(name)
        return self._actions[kind, name]

    def _step(self, name: str) -> Action:
        batch = work.BATCHES[self.comm.world_size]
        inputs = torch.randn(batch, 10, generator=torch.Generator().manual_seed(0))
        return self._train(name, self._emulated, inputs)

    def _real_step(self, name: str) -> Action:
        batch = work.REAL_BATCHES[self.comm.world_size]
        model = model_step.build("resnet18")
        return self._train(name, model, torch.randn(batch, *model_step.SHAPE))

    def _train(self, name: str, model: nn.Module, inputs: Tensor) -> Action:
        contender = work.CONTENDERS[name]
        make = strategies.get(contender.strategy, builtin=contender.builtin)
        strategy, comm = make(**contender.options), self.comm
        if contender.dealt_out:
            comm = SubComm(comm, dealt_out_order(comm.world_size))
        if not isinstance(strategy, RingAllReduce):
            # Its hooks on the parameters would run for the others, too.
            model = copy.deepcopy(model)
        strategy.setup(comm, model, partial(torch.optim.SGD, lr=1e-3))
        targets = torch.zeros(len(inputs), dtype=torch.long)
        return partial(strategy.step, inputs, targets, len(inputs) * comm.world_size)

    def _message(self, num_bytes: str) -> Action:
        """One step of a ring: every rank sends to the right, and receives from the left."""
        comm = self.comm
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        out = torch.ones(int(num_bytes) // 4)
        return partial(comm.exchange, out, right, torch.empty_like(out), left)

    def _message_inside(self, num_bytes: str) -> Action:
        """One step of a ring of two, on every host at the same time."""
        partner = self.comm.rank ^ 1
        out = torch.ones(int(num_bytes) // 4)
        return partial(self.comm.exchange, out, partner, torch.empty_like(out), partner)

    def _addition(self, num_bytes: str) -> Action:
        addend = torch.ones(int(num_bytes) // 4)
        return partial(torch.zeros_like(addend).add_, addend)

    def _all_reduce(self, name: str) -> Action:
        functions: dict[str, Any] = {
            work.FLAT: collectives.ring_all_reduce,
            work.DEALT_OUT: _dealt_out_ring,
            work.HIERARCHICAL: collectives.fast_hierarchical_all_reduce,
        }
        return partial(functions[name], self.comm, torch.ones(work.PARAMETERS))


def _dealt_out_ring(comm: Comm, tensor: Tensor) -> Tensor:
    """A ring on which the hosts take turns, as where a scheduler deals the ranks out to them."""
    order = dealt_out_order(comm.world_size)
    return collectives.ring_all_reduce(SubComm(comm, order), tensor)


def _seconds_by_kind(comm: Comm) -> dict[str, float]:
    sums = comm.session.sums
    return sums.so_far(main_lane_only=True) if sums else {}


def _told(comm: Comm) -> str:
    """Rank 0's next line, on every rank; empty at its end."""
    line = sys.stdin.readline().strip() if comm.rank == 0 else ""
    packed = torch.zeros(_LONGEST_LINE, dtype=torch.uint8)
    packed[: len(line)] = torch.tensor(list(line.encode()), dtype=torch.uint8)
    packed = collectives.broadcast(comm, packed, root=0)
    return bytes(packed.tolist()).rstrip(b"\0").decode()


def _answer(comm: Comm, answer: dict[str, Any]) -> None:
    if comm.rank == 0:
        print(f"{work.ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
