"""More answers to ``check.tree``: right ones in unusual forms, wrong ones that look right."""

import torch
from graded import Answers
from ranks import travel_by_value

from answers.tree import doubles
from workbook import check

travel_by_value(__name__)


def distances(comm):
    return [2**k for k in range(comm.world_size.bit_length() - 1)]


def largest_distance_first(comm, tensor):
    incoming = torch.empty_like(tensor)
    for distance in reversed(distances(comm)):
        tensor += comm.exchange(tensor, comm.rank ^ distance, incoming, comm.rank ^ distance)


def recursively(comm, tensor, distance=1):
    if distance < comm.world_size:
        partner = comm.rank ^ distance
        theirs = comm.exchange(tensor, partner, torch.empty_like(tensor), partner)
        torch.add(tensor, theirs, out=tensor)
        recursively(comm, tensor, 2 * distance)
    return tensor


def with_numpy(comm, tensor):
    mine = tensor.numpy()
    for distance in distances(comm):
        group = comm.rank // distance
        partner = comm.rank + distance if group % 2 == 0 else comm.rank - distance
        mine += comm.exchange(tensor, partner, tensor.clone(), partner).numpy()


def lower_partner_adds(comm, tensor):
    """Whoever has the lower number receives first."""
    for distance in distances(comm):
        partner, own = comm.rank ^ distance, tensor.clone()
        if comm.rank > partner:
            comm.send(own, partner)
        comm.recv_add(tensor, partner)
        if comm.rank < partner:
            comm.send(own, partner)


def in_two_rows(comm, tensor):
    rows = torch.stack([tensor, tensor])
    for distance in distances(comm):
        comm.exchange(rows[0], comm.rank ^ distance, rows[1], comm.rank ^ distance)
        rows[0] = rows.sum(0)
    tensor[:] = rows[0]


def three_rounds_always(comm, tensor):
    doubles(3, lambda rank, k: (rank ^ 2**k) % comm.world_size)(comm, tensor)


def one_round_too_few(comm, tensor):
    doubles(max(1, len(distances(comm)) - 1), lambda rank, k: rank ^ 2**k)(comm, tensor)


def steps_of_two(comm, tensor):
    """Distances 1, 3, 5: right on two ranks."""
    doubles(len(distances(comm)), lambda rank, k: rank ^ (2 * k + 1))(comm, tensor)


def sends_on_in_a_circle(comm, tensor):
    """Right values on a power of two, but not with the partner that the exercise asks for."""
    for distance in distances(comm):
        right, left = (comm.rank + distance) % comm.world_size, comm.rank - distance
        tensor += comm.exchange(tensor, right, torch.empty_like(tensor), left % comm.world_size)


def binds_the_name(comm, tensor):
    for distance in distances(comm):
        partner = comm.rank ^ distance
        tensor = tensor + comm.exchange(tensor, partner, torch.empty_like(tensor), partner)
    return tensor


def waits_in_each_round(comm, tensor):
    for distance in distances(comm):
        partner = comm.rank ^ distance
        tensor += comm.exchange(tensor, partner, torch.empty_like(tensor), partner)
        comm.barrier()


def averages_the_pairs(comm, tensor):
    recursively(comm, tensor)
    tensor /= comm.world_size


def in_half_precision(comm, tensor):
    recursively(comm, half := tensor.half())
    tensor.copy_(half)


RIGHT = [largest_distance_first, recursively, with_numpy, lower_partner_adds, in_two_rows]
WRONG = [
    (three_rounds_always, "run.error"),
    (one_round_too_few, "sum.lacks"),
    (steps_of_two, "peers.wrong"),
    (sends_on_in_a_circle, "peers.wrong"),
    (binds_the_name, "value.new_tensor"),
    (waits_in_each_round, "traffic.barrier"),
    (averages_the_pairs, "sum.mean"),
    (in_half_precision, "sum.rounded"),
]


ANSWERS = [Answers(check.tree.all_reduce, RIGHT, WRONG, 4)]
