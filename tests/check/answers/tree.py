"""Answers to ``check.tree``."""

import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check, collectives

travel_by_value(__name__)


def doubles(rounds, peer_of, add=True):
    """Exchange with ``peer_of(rank, round)`` in each of ``rounds`` rounds."""

    def fn(comm, tensor):
        for round_ in range(rounds):
            incoming = torch.empty_like(tensor)
            peer = peer_of(comm.rank, round_)
            comm.exchange(tensor, peer, incoming, peer)
            tensor.copy_(tensor + incoming if add else incoming)

    return fn


stops_after_one_round = doubles(1, lambda rank, k: rank ^ 1)


def sends_its_own_each_time(comm, tensor):
    own = tensor.clone()
    for peer in (comm.rank ^ 1, comm.rank ^ 2):
        incoming = torch.empty_like(tensor)
        comm.exchange(own, peer, incoming, peer)
        tensor += incoming


def lower_rank_sends_first(comm, tensor):
    for bit in range(comm.world_size.bit_length() - 1):
        peer = comm.rank ^ 2**bit
        own, incoming = tensor.clone(), torch.empty_like(tensor)
        if comm.rank < peer:
            comm.send(own, peer)
            comm.recv(incoming, peer)
        else:
            comm.recv(incoming, peer)
            comm.send(own, peer)
        tensor += incoming


def adds_itself(comm, tensor):
    doubles(2, lambda rank, k: rank ^ 2**k)(comm, tensor.clone())
    for _ in range(2):
        tensor += tensor


def tries_each_distance(comm, tensor):
    doubles(comm.world_size // 2, lambda rank, k: rank ^ (k + 1))(comm, tensor)


def leaves_alone(*sizes):
    def fn(comm, tensor):
        if len(tensor) not in sizes:
            collectives.tree_all_reduce(comm, tensor)

    return fn


leaves_ten_alone = leaves_alone(10)


ANSWERS = [
    Answers(
        check.tree.all_reduce,
        [collectives.tree_all_reduce, lower_rank_sends_first],
        [
            (
                adds_itself,
                "sum.other",
                "not sum.overwritten",
                "it is 4 x rank 0, expected rank 0 + rank 1",
            ),
            (leaves_ten_alone, "value.size_other"),
            (leaves_alone(1), "value.size_one"),
            (stops_after_one_round, "sum.lacks"),
            (doubles(2, lambda rank, k: rank ^ 1), "sum.other"),
            (
                doubles(3, lambda rank, k: rank ^ (1, 2, 1)[k]),
                "messages.one_more",
                "not bytes.whole_tensor",
            ),
            (doubles(2, lambda rank, k: rank ^ 2**k, add=False), "sum.overwritten"),
            (sends_its_own_each_time, "sum.lacks_one"),
            (doubles(2, lambda rank, k: (rank + 2**k) % 4), "run.stuck"),
            (collectives.naive_all_reduce, "peers.bottleneck"),
            (collectives.ring_all_reduce, "traffic.off_target", "6, where the target is 2"),
        ],
        on=4,
    ),
]
