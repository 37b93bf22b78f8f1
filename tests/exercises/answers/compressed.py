"""Answers to ``check.compressed``."""

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit.collectives import all_gather, ring_all_reduce, share_only
from labkit.collectives.ring import split_chunks
from workbook import check

travel_by_value(__name__)


# half_the_bytes(comm, tensor)


def halves_messages(comm, tensor, half=torch.float16, rounds=True):
    P, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % P, (rank - 1) % P
    chunks = tensor.tensor_split(P)
    for step in range(P - 1):
        target = chunks[(rank - step - 1) % P]
        incoming = torch.empty_like(target, dtype=half)
        comm.exchange(chunks[(rank - step) % P].to(half), right, incoming, left)
        target += incoming
    if rounds:
        chunks[(rank + 1) % P].copy_(chunks[(rank + 1) % P].to(half))
    for step in range(P - 1):
        target = chunks[(rank - step) % P]
        incoming = torch.empty_like(target, dtype=half)
        comm.exchange(chunks[(rank + 1 - step) % P].to(half), right, incoming, left)
        target.copy_(incoming)


def in_bfloat16(comm, tensor):
    halves_messages(comm, tensor, torch.bfloat16)


def around(comm, chunks):
    """A ring that adds in the precision of the chunks."""
    P, rank = comm.world_size, comm.rank
    for step in range(P - 1):
        target = chunks[(rank - step - 1) % P]
        incoming = torch.empty_like(target)
        comm.exchange(chunks[(rank - step) % P], (rank + 1) % P, incoming, (rank - 1) % P)
        target += incoming
    share_only(comm, chunks)


def adds_halves(comm, tensor):
    small = tensor.half()
    around(comm, list(small.tensor_split(comm.world_size)))
    tensor.copy_(small)


def in_numpy(comm, tensor):
    small = torch.from_numpy(tensor.numpy().astype(np.float16))
    around(comm, split_chunks(small, comm.world_size))
    tensor.numpy()[:] = small.numpy()


def with_share_only(comm, tensor):
    chunks = split_chunks(tensor, comm.world_size)
    P, rank = comm.world_size, comm.rank
    for step in range(P - 1):
        outgoing = chunks[(rank - step) % P].to(torch.float16)
        target = chunks[(rank - step - 1) % P]
        incoming = target.to(torch.float16)
        target += comm.exchange(outgoing, (rank + 1) % P, incoming, (rank - 1) % P).float()
    small = [chunk.half() for chunk in chunks]
    share_only(comm, small)
    tensor.copy_(torch.cat(small))


def padded(comm, tensor):
    P = comm.world_size
    small = torch.zeros(-(-len(tensor) // P) * P, dtype=torch.float16)
    small[: len(tensor)] = tensor
    around(comm, list(small.chunk(P)) if len(small) else [small] * P)
    tensor[:] = small[: len(tensor)].float()


def as_integers(comm, tensor):
    """The bits of the halves, in messages of int16."""
    P, rank = comm.world_size, comm.rank
    chunks = [chunk.half() for chunk in split_chunks(tensor, P)]
    for step in range(2 * (P - 1)):
        target = (rank - step - 1) % P
        incoming = torch.empty(len(chunks[target]), dtype=torch.int16)
        outgoing = chunks[(rank - step) % P].view(torch.int16)
        comm.exchange(outgoing, (rank + 1) % P, incoming, (rank - 1) % P)
        received = incoming.view(torch.half)
        chunks[target] = chunks[target] + received if step < P - 1 else received
    tensor.copy_(torch.cat(chunks))


def by_the_exact_ring(comm, tensor):
    ring_all_reduce(comm, tensor)


def by_the_librarys_ring(comm, tensor):
    """Its partial sums travel as float32."""
    small = tensor.half()
    ring_all_reduce(comm, small)
    tensor.copy_(small)


def keeps_its_own_unrounded(comm, tensor):
    halves_messages(comm, tensor, rounds=False)


def forgets_the_copy(comm, tensor):
    adds_halves(comm, tensor.clone())


def divides(comm, tensor):
    adds_halves(comm, tensor)
    tensor /= comm.world_size


def in_eight_bits(comm, tensor):
    adds_halves(comm, tensor)
    tensor.copy_((tensor * 4).round() / 4)


# top_k(comm, gradient, residual, k)


def adds_up(comm, size, values, places):
    total = torch.zeros(size)
    for v, p in zip(all_gather(comm, values), all_gather(comm, places)):
        total.index_add_(0, p, v)
    return total


def sparse(comm, gradient, residual, k, order=torch.abs):
    left = gradient + residual
    places = order(left).topk(k).indices
    total = adds_up(comm, len(left), left[places], places)
    return [total, left.index_fill(0, places, 0.0)]


def by_sorting(comm, gradient, residual, k):
    left = (gradient + residual).tolist()
    places = sorted(range(len(left)), key=lambda place: -abs(left[place]))[:k]
    mine = torch.tensor([left[place] for place in places])
    total = adds_up(comm, len(left), mine, torch.tensor(places))
    return total, torch.tensor([0.0 if p in places else v for p, v in enumerate(left)])


def by_partition(comm, gradient, residual, k):
    left = gradient.numpy() + residual.numpy()
    places = np.argpartition(np.abs(left), -k)[-k:]
    total = adds_up(comm, len(left), torch.from_numpy(left[places]), torch.from_numpy(places))
    left[places] = 0
    return total.numpy(), left


def by_a_ring(comm, gradient, residual, k):
    """Pairs travel around: as many bytes as all_gather."""
    left = gradient + residual
    places = left.abs().argsort(descending=True)[:k]
    total = torch.zeros_like(left).index_add(0, places, left[places])
    right, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    values, at = left[places], places
    for _ in range(comm.world_size - 1):
        values = comm.exchange(values, right, torch.empty_like(values), before)
        at = comm.exchange(at, right, torch.empty_like(at), before)
        total.scatter_add_(0, at, values)
    return [total, left.masked_fill(torch.zeros(len(left)).bool().index_fill(0, places, 1), 0)]


def with_short_places(comm, gradient, residual, k):
    """Places of four bytes: fewer bytes than asked."""
    left = gradient + residual
    places = left.abs().topk(k).indices
    total = torch.zeros_like(left)
    for v, p in zip(all_gather(comm, left[places]), all_gather(comm, places.int())):
        total.index_add_(0, p, v)
    left[places] = 0
    return total, left


def in_place_of_the_residual(comm, gradient, residual, k):
    residual += gradient
    places = torch.topk(residual.abs(), k, sorted=False).indices
    total = adds_up(comm, len(residual), residual[places], places)
    residual[places] = 0
    yield total
    yield residual


def sends_one_fewer(comm, gradient, residual, k):
    return sparse(comm, gradient, residual, k - 1)


def overwrites_places(comm, gradient, residual, k):
    left = gradient + residual
    places, total = left.abs().topk(k).indices, torch.zeros_like(left)
    for v, p in zip(all_gather(comm, left[places]), all_gather(comm, places)):
        total[p] = v
    return [total, left.index_fill(0, places, 0.0)]


def forgets(comm, gradient, residual, k):
    total, left = sparse(comm, gradient, residual, k)
    return [total, torch.zeros_like(left)]


def ignores_the_residual(comm, gradient, residual, k):
    return sparse(comm, gradient, torch.zeros_like(residual), k)


def keeps_everything(comm, gradient, residual, k):
    return [sparse(comm, gradient, residual, k)[0], gradient + residual]


def keeps_what_it_sent(comm, gradient, residual, k):
    total, left = sparse(comm, gradient, residual, k)
    return [total, gradient + residual - left]


def takes_the_largest(comm, gradient, residual, k):
    return sparse(comm, gradient, residual, k, order=lambda values: values)


def sends_nothing(comm, gradient, residual, k):
    left = sparse(comm, gradient, residual, k)[1]
    return [gradient + residual - left, left]


def takes_the_mean(comm, gradient, residual, k):
    total, left = sparse(comm, gradient, residual, k)
    return [total / comm.world_size, left]


def sends_zeros_too(comm, gradient, residual, k):
    left = gradient + residual
    places = left.abs().topk(k).indices
    left = left.index_fill(0, places, 0.0)
    return [ring_all_reduce(comm, gradient + residual - left), left]


ANSWERS = [
    Answers(
        check.compressed.half_the_bytes,
        [
            halves_messages,
            in_bfloat16,
            adds_halves,
            in_numpy,
            with_share_only,
            padded,
            as_integers,
        ],
        [
            (by_the_exact_ring, "traffic.off_target"),
            (by_the_librarys_ring, "traffic.off_target"),
            (keeps_its_own_unrounded, "half.ranks_differ"),
            (forgets_the_copy, "half.unchanged"),
            (divides, "half.mean"),
            (in_eight_bits, "half.too_far"),
        ],
    ),
    Answers(
        check.compressed.top_k,
        [
            sparse,
            by_sorting,
            by_partition,
            by_a_ring,
            with_short_places,
            in_place_of_the_residual,
        ],
        [
            (sends_one_fewer, "value.wrong"),
            (overwrites_places, "top_k.last_wins"),
            (forgets, "top_k.lost"),
            (ignores_the_residual, "top_k.forgot_residual"),
            (keeps_everything, "top_k.sent_and_kept"),
            (keeps_what_it_sent, "top_k.kept_the_sent"),
            (takes_the_largest, "top_k.not_by_magnitude"),
            (sends_nothing, "top_k.own_alone"),
            (takes_the_mean, "top_k.mean"),
            (sends_zeros_too, "traffic.off_target"),
        ],
    ),
]
