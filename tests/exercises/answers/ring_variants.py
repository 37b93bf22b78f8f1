"""More answers to ``check.ring``: right ones in unusual forms, wrong ones that look right."""

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from answers.ring import adds, copies, neighbours, overwrites, reduces_in, variant
from labkit import collectives
from labkit.collectives.ring import split_chunks
from workbook import check

travel_by_value(__name__)


# share_reduce(comm, chunks)


def carries_one_buffer(comm, chunks):
    right, left = neighbours(comm)
    carried = chunks[comm.rank].clone()
    for place in range(comm.rank - 1, comm.rank - comm.world_size, -1):
        coming = torch.empty_like(chunks[place])
        comm.exchange(carried, right, coming, left)
        carried = chunks[place] + coming
    chunks[(comm.rank + 1) % comm.world_size][:] = carried


def works_on_copies(comm, chunks):
    copied = [chunk.clone() for chunk in chunks]
    reduces_in(comm, copied, comm.world_size - 1)
    for chunk, copy in zip(chunks, copied):
        torch.add(copy, 0, out=chunk)


def even_ranks_send_first(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        outgoing = chunks[(comm.rank - step) % comm.world_size]
        target = chunks[(comm.rank - step - 1) % comm.world_size]
        if comm.rank % 2:
            comm.recv_add(target, left)
            comm.send(outgoing, right)
        else:
            comm.send(outgoing, right)
            comm.recv_add(target, left)


def steps_recursively(comm, chunks, steps=None):
    steps = comm.world_size - 1 if steps is None else steps
    if steps == 0:
        return chunks
    right, left = neighbours(comm)
    place = (comm.rank + steps + 1) % comm.world_size
    coming = comm.exchange(chunks[place], right, torch.empty_like(chunks[place - 1]), left)
    chunks[place - 1].add_(coming)
    return steps_recursively(comm, chunks, steps - 1)


def adds_with_numpy(comm, chunks):
    right, left = neighbours(comm)
    arrays = [chunk.numpy() for chunk in chunks]
    for step in range(comm.world_size - 1):
        place = (comm.rank - step) % comm.world_size
        coming = torch.empty(arrays[place - 1].shape)
        comm.exchange(torch.from_numpy(arrays[place]), right, coming, left)
        arrays[place - 1] += coming.numpy()


def rotates_the_list(comm, chunks):
    """Chunk 0 of the rotated list is the one to send."""
    right, left = neighbours(comm)
    order = chunks[comm.rank :: -1] + chunks[: comm.rank : -1]
    for outgoing, target in pairwise(order):
        target += comm.exchange(outgoing, right, torch.empty_like(target), left)


def two_steps_at_most(comm, chunks):
    reduces_in(comm, chunks, min(comm.world_size, 3) - 1)


def for_equal_chunks(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        place = (comm.rank - step) % comm.world_size
        coming = torch.empty_like(chunks[0])
        comm.exchange(chunks[place], right, coming, left)
        chunks[place - 1] += coming


def adds_magnitudes(chunks, i, incoming):
    chunks[i] += incoming.abs()


def adds_rounded(chunks, i, incoming):
    chunks[i] += (incoming * 1000).round() / 1000


def adds_to_what_it_sent(chunks, i, incoming):
    sent = chunks[(i + 1) % len(chunks)]
    sent[: len(incoming)] += incoming[: len(sent)]


def waits_in_each_step(comm, chunks):
    def adds_and_waits(chunks, i, incoming):
        adds(chunks, i, incoming)
        comm.barrier()

    reduces_in(comm, chunks, comm.world_size - 1, put=adds_and_waits)


def through_the_left_and_back(comm, chunks):
    """The sum is that of the left neighbour's chunk: the numbers are those of MPI."""
    reduces_in(comm, chunks, comm.world_size - 1, first=-1)


def sends_zeros(comm, chunks):
    reduces_in(comm, [torch.zeros_like(chunk) for chunk in chunks], comm.world_size - 1)


def subtracts(chunks, i, incoming):
    chunks[i] -= incoming


RIGHT_SHARE_REDUCE = [
    carries_one_buffer,
    works_on_copies,
    even_ranks_send_first,
    steps_recursively,
    adds_with_numpy,
    rotates_the_list,
]
WRONG_SHARE_REDUCE = [
    (two_steps_at_most, "messages.one_less"),
    (for_equal_chunks, "run.stuck", "receives into float32 [3]"),
    (variant(put=adds_magnitudes), "value.numbers"),
    (variant(put=adds_rounded), "value.wrong"),
    (variant(put=adds_to_what_it_sent), "value.wrong"),
    (waits_in_each_step, "traffic.barrier"),
    (through_the_left_and_back, "chunk.other_complete"),
    (sends_zeros, "value.unchanged"),
    (variant(put=subtracts), "value.wrong"),
]


# share_only(comm, chunks), to the right and to the left


def passes_on(to):
    """Each step passes on the tensor that came in the step before."""

    def fn(comm, chunks):
        right, left = neighbours(comm)
        dst, src, way = (right, left, -1) if to == "right" else (left, right, 1)
        place, held = comm.rank + 1, chunks[(comm.rank + 1) % comm.world_size]
        for _ in range(comm.world_size - 1):
            place += way
            held = comm.exchange(held, dst, chunks[place % comm.world_size], src)

    return fn


def collects_then_copies(to):
    def fn(comm, chunks):
        right, left = neighbours(comm)
        dst, src, way = (right, left, -1) if to == "right" else (left, right, 1)
        ways = [(comm.rank + 1 + way * s) % comm.world_size for s in range(comm.world_size)]
        found = {ways[0]: chunks[ways[0]]}
        for last, next_ in pairwise(ways):
            found[next_] = comm.exchange(found[last], dst, chunks[next_].clone(), src)
        for place, values in found.items():
            chunks[place].copy_(values)
        return tuple(chunks)

    return fn


def in_turns(to):
    """Even ranks send first."""

    def fn(comm, chunks):
        right, left = neighbours(comm)
        dst, src, way = (right, left, -1) if to == "right" else (left, right, 1)
        for step in range(comm.world_size - 1):
            outgoing = chunks[(comm.rank + 1 + way * step) % comm.world_size]
            target = chunks[(comm.rank + 1 + way * (step + 1)) % comm.world_size]
            calls = [lambda out=outgoing: comm.send(out, dst), lambda t=target: comm.recv(t, src)]
            for call in calls[:: -1 if comm.rank % 2 else 1]:
                call()

    return fn


def by_recursion(to):
    def fn(comm, chunks, step=0):
        right, left = neighbours(comm)
        dst, src, way = (right, left, -1) if to == "right" else (left, right, 1)
        if step < comm.world_size - 1:
            place = (comm.rank + 1 + way * step) % comm.world_size
            comm.exchange(chunks[place], dst, chunks[(place + way) % comm.world_size], src)
            fn(comm, chunks, step + 1)

    return fn


def in_one_tensor(to):
    """The chunks are rows of a table, copied back at the end."""

    def fn(comm, chunks):
        right, left = neighbours(comm)
        dst, src, way = (right, left, -1) if to == "right" else (left, right, 1)
        table = torch.zeros(comm.world_size, max(map(len, chunks)))
        for row, chunk in zip(table, chunks):
            row[: len(chunk)] = chunk
        for step in range(comm.world_size - 1):
            out = (comm.rank + 1 + way * step) % comm.world_size
            into = (out + way) % comm.world_size
            landing = table[into, : len(chunks[into])]
            comm.exchange(table[out, : len(chunks[out])], dst, landing, src)
        for row, chunk in zip(table, chunks):
            chunk.copy_(row[: len(chunk)])

    return fn


RIGHT_WAYS = [passes_on, collects_then_copies, in_turns, by_recursion, in_one_tensor]


def always_sends_its_own(comm, chunks):
    right, left = neighbours(comm)
    own = chunks[(comm.rank + 1) % comm.world_size].clone()
    for step in range(comm.world_size - 1):
        target = chunks[(comm.rank - step) % comm.world_size]
        coming = torch.empty_like(chunks[comm.rank])
        comm.exchange(own, right, coming, left)
        n = min(len(target), len(coming))
        target[:n] = coming[:n]


def two_copies_at_most(comm, chunks):
    copies(more=min(comm.world_size, 3) - 1 - comm.world_size)(comm, chunks)


def averages_what_comes(chunks, i, incoming):
    chunks[i].copy_((chunks[i] + incoming) / 2)


def zeroes_its_own(comm, chunks):
    collectives.share_only(comm, chunks)
    chunks[(comm.rank + 1) % comm.world_size].zero_()


def goes_both_ways(comm, chunks):
    copies()(comm, chunks)
    copies(to="left")(comm, chunks)


def numbers_go_down(comm, chunks):
    """To the left, with the chunk numbers of the ring to the right."""
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        out = chunks[(comm.rank + 1 - step) % comm.world_size]
        into = chunks[(comm.rank - step) % comm.world_size]
        n = min(len(out), len(into))
        comm.exchange(out[:n].clone(), left, into[:n], right)


WRONG_SHARE_ONLY = [
    (always_sends_its_own, "value.wrong"),
    (two_copies_at_most, "messages.one_less"),
    (copies(put=averages_what_comes), "value.wrong"),
    (zeroes_its_own, "value.zeros"),
    (goes_both_ways, "traffic.doubled"),
    (copies(more=0), "messages.one_more"),
]
WRONG_LEFT = [
    (copies(to="left", more=-2), "messages.one_less"),
    (copies(to="left", more=0), "messages.one_more"),
    (copies(to="left", put=adds), "value.wrong"),
    (copies(to="left", first=0), "value.wrong"),
    (copies(to="left", put=lambda chunks, i, incoming: None), "value.unchanged"),
]


# all_reduce(comm, tensor)


def around(comm, chunks, first=0):
    """Both halves of the ring, with any chunks, from chunk ``rank + first`` on."""
    reduces_in(comm, chunks, comm.world_size - 1, first)
    reduces_in(comm, chunks, comm.world_size - 1, first + 1, put=overwrites)


def numbers_of_mpi(comm, tensor):
    """Rank r ends the first half with chunk r."""
    around(comm, list(tensor.tensor_split(comm.world_size)), first=-1)


def remainder_at_the_end(comm, tensor):
    size = tensor.numel() // comm.world_size
    rest = tensor.numel() - size * (comm.world_size - 1)
    around(comm, list(tensor.view(-1).split([size] * (comm.world_size - 1) + [rest])))


def full_chunks_first(comm, tensor):
    flat, size = tensor.view(-1), -(-tensor.numel() // comm.world_size)
    around(comm, [flat[c * size : (c + 1) * size] for c in range(comm.world_size)])


def pads_the_tensor(comm, tensor):
    flat = torch.nn.functional.pad(tensor.view(-1), (0, -tensor.numel() % comm.world_size))
    table = flat.view(comm.world_size, -1)
    around(comm, list(table))
    return tensor.copy_(table.flatten()[: tensor.numel()].view_as(tensor))


def every_pth_element(comm, tensor):
    around(comm, [tensor[c :: comm.world_size] for c in range(comm.world_size)])


def numbers_backwards(comm, tensor):
    around(comm, split_chunks(tensor.view(-1), comm.world_size)[::-1], first=2)


def sends_no_empty_messages(comm, tensor):
    right, left = neighbours(comm)
    chunks = split_chunks(tensor.view(-1), comm.world_size)
    for step in range(2 * comm.world_size - 2):
        out = chunks[(comm.rank - step) % comm.world_size]
        into = chunks[(comm.rank - step - 1) % comm.world_size]
        coming = torch.empty_like(into)
        if len(out) and len(into):
            comm.exchange(out, right, coming, left)
        elif len(out):
            comm.send(out, right)
        elif len(into):
            comm.recv(coming, left)
        into.copy_(into + coming if step < comm.world_size - 1 else coming)


def two_ranks_in_one_step(comm, tensor):
    if comm.world_size > 2:
        around(comm, split_chunks(tensor.view(-1), comm.world_size))
    else:
        tensor += comm.exchange(tensor, 1 - comm.rank, tensor.clone().zero_(), 1 - comm.rank)


def sums_twice_and_divides(comm, tensor):
    for _ in range(2):
        around(comm, split_chunks(tensor, comm.world_size))
    tensor /= comm.world_size


def nothing_for_few_elements(comm, tensor):
    if len(tensor) >= comm.world_size:
        around(comm, split_chunks(tensor, comm.world_size))


def adds_a_little(comm, tensor):
    around(comm, split_chunks(tensor, comm.world_size))
    tensor += 1e-4


def forgets_small_numbers(comm, tensor):
    tensor[tensor.abs() < 1e-2] = 0
    around(comm, split_chunks(tensor, comm.world_size))


class KeepsItsChunks:
    chunks = None

    def __call__(self, comm, tensor):
        if self.chunks is None:
            self.chunks = split_chunks(tensor, comm.world_size)
        around(comm, self.chunks)


def waits_between_the_halves(comm, tensor):
    chunks = split_chunks(tensor, comm.world_size)
    reduces_in(comm, chunks, comm.world_size - 1)
    comm.barrier()
    copies()(comm, chunks)


def leaves_the_last_element(comm, tensor):
    around(comm, split_chunks(tensor[:-1], comm.world_size))


def only_rank_0_is_right(comm, tensor):
    before = tensor.clone()
    around(comm, split_chunks(tensor, comm.world_size))
    if comm.rank:
        tensor.copy_(before)


def in_another_order_on_each_rank(comm, tensor):
    """The values are those of the sum, but rank by rank in another order of additions."""
    right, left = neighbours(comm)
    parts, passing = {comm.rank: tensor.clone()}, tensor.clone()
    for step in range(comm.world_size - 1):
        passing = comm.exchange(passing, right, torch.empty_like(tensor), left)
        parts[(comm.rank - 1 - step) % comm.world_size] = passing
    tensor.copy_(torch.stack([parts[rank] for rank in range(comm.world_size)]).sum(0))


def as_integers(comm, tensor):
    whole = (tensor * 1000).round().to(torch.int32)
    around(comm, split_chunks(whole, comm.world_size))
    tensor.copy_(whole / 1000)


RIGHT_RING = [
    numbers_of_mpi,
    remainder_at_the_end,
    full_chunks_first,
    pads_the_tensor,
    every_pth_element,
    numbers_backwards,
    sends_no_empty_messages,
    two_ranks_in_one_step,
]
WRONG_RING = [
    (sums_twice_and_divides, "traffic.doubled"),
    (nothing_for_few_elements, "value.size_below_ranks"),
    (adds_a_little, "value.wrong"),
    (forgets_small_numbers, "value.wrong"),
    (KeepsItsChunks(), "value.wrong"),
    (waits_between_the_halves, "traffic.barrier"),
    (leaves_the_last_element, "value.wrong"),
    (only_rank_0_is_right, "value.one_right"),
    (in_another_order_on_each_rank, "bytes.whole_tensor"),
    (as_integers, "value.wrong"),
]


def to_the_right(makers):
    return [maker("right") for maker in makers]


def to_the_left(makers):
    return [maker("left") for maker in makers]


ANSWERS = [
    Answers(check.ring.share_reduce, RIGHT_SHARE_REDUCE, WRONG_SHARE_REDUCE, 4),
    Answers(check.ring.share_only, to_the_right(RIGHT_WAYS), WRONG_SHARE_ONLY, 4),
    Answers(check.ring.all_reduce, RIGHT_RING, WRONG_RING, 4),
]


# rotate_and_add(comm, tensor)


def rotates(comm, tensor, to="right", steps=-1, first=None):
    right, left = neighbours(comm)
    dst, src = (right, left) if to == "right" else (left, right)
    passing = tensor.clone() if first is None else first(tensor)
    for _ in range(comm.world_size + steps):
        incoming = torch.empty_like(tensor)
        comm.exchange(passing, dst, incoming, src)
        tensor += incoming
        passing = incoming


def collects_then_adds(comm, tensor):
    right, left = neighbours(comm)
    seen = [tensor.clone()]
    while len(seen) < comm.world_size:
        seen.append(comm.exchange(seen[-1], right, torch.zeros_like(tensor), left))
    tensor.copy_(torch.stack(seen).sum(0))


def rotates_by_parity(comm, tensor):
    right, left = neighbours(comm)
    passing = tensor.clone()
    for _ in range(comm.world_size - 1):
        incoming = torch.empty_like(passing)
        if comm.rank % 2:
            comm.recv(incoming, left)
            comm.send(passing, right)
        else:
            comm.send(passing, right)
            comm.recv(incoming, left)
        tensor.add_(incoming)
        passing = incoming


def rotates_in_numpy(comm, tensor):
    right, left = neighbours(comm)
    total, passing = tensor.numpy(), tensor.numpy().copy()
    for _ in range(comm.world_size - 1):
        incoming = np.zeros_like(passing)
        comm.exchange(torch.from_numpy(passing), right, torch.from_numpy(incoming), left)
        total += incoming
        passing = incoming


def rotates_by_recursion(comm, tensor):
    right, left = neighbours(comm)

    def pass_on(passing, left_over):
        if left_over:
            incoming = comm.exchange(passing, right, torch.empty_like(passing), left)
            tensor.add_(incoming)
            pass_on(incoming, left_over - 1)

    pass_on(tensor.clone(), comm.world_size - 1)


def adds_in_float64(comm, tensor):
    right, left = neighbours(comm)
    total, passing = tensor.double(), tensor.clone()
    buffers = [torch.empty_like(tensor), passing]
    for step in range(comm.world_size - 1):
        comm.exchange(buffers[step % 2 - 1], right, buffers[step % 2], left)
        total += buffers[step % 2]
    tensor.copy_(total)
    return tensor


def passes_on_the_sum(comm, tensor):
    right, left = neighbours(comm)
    for _ in range(comm.world_size - 1):
        incoming = torch.empty_like(tensor)
        comm.exchange(tensor, right, incoming, left)
        tensor += incoming


def passes_on_its_own_each_time(comm, tensor):
    right, left = neighbours(comm)
    own = tensor.clone()
    for _ in range(comm.world_size - 1):
        tensor += comm.exchange(own, right, torch.empty_like(own), left)


def keeps_only_the_last(comm, tensor):
    right, left = neighbours(comm)
    passing = tensor.clone()
    for _ in range(comm.world_size - 1):
        passing = comm.exchange(passing, right, torch.empty_like(tensor), left)
    tensor.copy_(passing)


def adds_to_a_new_tensor(comm, tensor):
    total = tensor.clone()
    rotates(comm, total)
    return total


def sends_before_it_receives(comm, tensor):
    right, left = neighbours(comm)
    for _ in range(comm.world_size - 1):
        incoming = torch.empty_like(tensor)
        comm.send(tensor, right)
        comm.recv(incoming, left)


ROTATE = Answers(
    check.ring.rotate_and_add,
    [
        rotates,
        collects_then_adds,
        rotates_by_parity,
        rotates_in_numpy,
        rotates_by_recursion,
        adds_in_float64,
    ],
    [
        (passes_on_the_sum, "sum.twice"),
        (passes_on_its_own_each_time, "value.wrong"),
        (keeps_only_the_last, "sum.overwritten"),
        (adds_to_a_new_tensor, "value.new_tensor"),
        (sends_before_it_receives, "run.stuck"),
        (partial(rotates, to="left"), "peers.left"),
        (partial(rotates, steps=-2), "messages.one_less"),
        (partial(rotates, steps=0), "messages.one_more"),
        (partial(rotates, first=lambda t: t.half().float()), "value.wrong"),
    ],
)
ANSWERS.append(ROTATE)
