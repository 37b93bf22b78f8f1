"""Answers to ``check.tree``."""

import math
from fractions import Fraction

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from labkit.costs import Link, crossover_bytes
from workbook import check

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


# choose(num_bytes, world_size, alpha_s, beta_s_per_byte)


def chooses(num_bytes, world_size, alpha_s, beta_s_per_byte):
    doublings, steps = (world_size - 1).bit_length(), 2 * (world_size - 1)
    tree_s = doublings * (alpha_s + num_bytes * beta_s_per_byte)
    ring_s = steps * (alpha_s + num_bytes / world_size * beta_s_per_byte)
    return "tree" if tree_s <= ring_s else "ring"


def by_the_difference(*, beta_s_per_byte, alpha_s, world_size, num_bytes):
    doublings = math.log2(world_size)
    steps = 2 * (world_size - 1)
    gained_s = (doublings - steps / world_size) * num_bytes * beta_s_per_byte
    return ("tree", "ring")[gained_s > (steps - doublings) * alpha_s]


def by_the_smallest(num_bytes, world_size, alpha_s, beta_s_per_byte):
    def seconds(messages, size):
        return messages * (alpha_s + beta_s_per_byte * size)

    times = {
        "tree": seconds(round(np.log2(world_size)), num_bytes),
        "ring": seconds(2 * world_size - 2, num_bytes / world_size),
    }
    return min(times, key=times.get)


def step_by_step(num_bytes, world_size, alpha_s, beta_s_per_byte):
    tree_s = ring_s = 0.0
    distance = 1
    while distance < world_size:
        tree_s += alpha_s + num_bytes * beta_s_per_byte
        distance *= 2
    for _ in range(world_size - 1):
        ring_s += 2 * (alpha_s + num_bytes * beta_s_per_byte / world_size)
    return "ring" if ring_s < tree_s else "tree"


def in_fractions(num_bytes, world_size, alpha_s, beta_s_per_byte):
    alpha, beta = Fraction(alpha_s), Fraction(beta_s_per_byte)
    ring = 2 * (world_size - 1) * (alpha + Fraction(num_bytes, world_size) * beta)
    tree = world_size.bit_length() * (alpha + num_bytes * beta) - (alpha + num_bytes * beta)
    return "ring" if ring < tree else "tree"


def by_crossover(num_bytes, world_size, alpha_s, beta_s_per_byte):
    limit = crossover_bytes(world_size, Link(alpha_s, beta_s_per_byte or 1e-300))
    return "tree" if num_bytes <= limit else "ring"


def costs_of(steps, chunk, doublings=lambda P: P.bit_length() - 1, tree_wins_ties=True):
    def fn(num_bytes, world_size, alpha_s, beta_s_per_byte):
        tree_s = doublings(world_size) * (alpha_s + num_bytes * beta_s_per_byte)
        size = chunk(num_bytes, world_size)
        ring_s = steps(world_size) * (alpha_s + size * beta_s_per_byte)
        return "tree" if tree_s < ring_s or (tree_wins_ties and tree_s == ring_s) else "ring"

    return fn


def both_halves(P):
    return 2 * (P - 1)


def of_chunks(num_bytes, P):
    return num_bytes / P


def the_slower_one(*case):
    return "ring" if chooses(*case) == "tree" else "tree"


def by_latency(num_bytes, world_size, alpha_s, beta_s_per_byte):
    return chooses(num_bytes, world_size, alpha_s, 0.0)


def by_bytes(num_bytes, world_size, alpha_s, beta_s_per_byte):
    return chooses(num_bytes, world_size, 0.0, beta_s_per_byte)


def by_a_size(num_bytes, world_size, alpha_s, beta_s_per_byte):
    return "tree" if num_bytes < 400_000 else "ring"


ANSWERS = [
    Answers(
        check.tree.choose,
        [
            chooses,
            by_the_difference,
            by_the_smallest,
            step_by_step,
            in_fractions,
            by_crossover,
        ],
        [
            (the_slower_one, "choose.swapped"),
            (costs_of(lambda P: P - 1, of_chunks), "choose.half_a_ring"),
            (costs_of(both_halves, lambda size, P: size), "choose.always_tree"),
            (by_latency, "choose.always_tree"),
            (by_bytes, "choose.bytes_alone"),
            (costs_of(both_halves, of_chunks, tree_wins_ties=False), "choose.tie"),
            (costs_of(both_halves, of_chunks, lambda P: P - 1), "choose.tree_in_p_steps"),
            (by_a_size, "answer.wrong"),
        ],
    ),
]
