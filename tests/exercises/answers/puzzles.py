"""Answers to ``check.puzzles``."""

import math
from functools import partial

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from workbook import check

travel_by_value(__name__)


def neighbours(comm):
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


def in_clothes(fn):
    """The same answer, called and returned in other ways."""

    def to_numpy(comm, tensor):
        return np.asarray(fn(comm, tensor))

    def to_numbers(comm, tensor):
        found = fn(comm, tensor)
        return found.tolist() if isinstance(found, torch.Tensor) else [*found]

    def by_keyword(*, tensor, comm):
        return fn(comm, tensor)

    return [fn, to_numpy, to_numbers, by_keyword]


# largest(comm, tensor)


def through_rank_0(comm, tensor):
    mine = tensor.max()
    if comm.rank:
        comm.send(mine, 0)
        return comm.recv(mine, 0)
    for rank in range(1, comm.world_size):
        mine = torch.maximum(mine, comm.recv(torch.empty(()), rank))
    for rank in range(1, comm.world_size):
        comm.send(mine, rank)
    return mine


def along_a_chain(comm, tensor):
    best, other = tensor.max().view(1), torch.empty(1)
    if comm.rank:
        best = torch.maximum(best, comm.recv(other, comm.rank - 1))
    if comm.rank < comm.world_size - 1:
        comm.send(best, comm.rank + 1)
        best = comm.recv(other, comm.rank + 1)
    if comm.rank:
        comm.send(best, comm.rank - 1)
    return best.item()


def by_the_library(comm, tensor):
    return collectives.naive_all_reduce(comm, tensor.max().view(1), "max").item()


def with_sorted_numpy(comm, tensor):
    number = torch.tensor([np.sort(tensor.numpy())[-1]])
    collectives.reduce(comm, number, 0, "max")
    collectives.broadcast(comm, number, 0)
    return float(number)


def sends_all(comm, tensor):
    return collectives.naive_all_reduce(comm, tensor, "max").max()


def asks_everyone(comm, tensor):
    return max(one.item() for one in collectives.all_gather(comm, tensor.max().view(1)))


def looks_at_its_own(comm, tensor):
    return tensor.max().item()


def starts_at_zero(comm, tensor):
    return max(0.0, along_a_chain(comm, tensor))


def by_magnitude(comm, tensor):
    return -along_a_chain(comm, tensor.abs())


# pass_on(comm, tensor)


def by_parity(comm, tensor):
    (right, left), incoming = neighbours(comm), torch.empty_like(tensor)
    if comm.rank % 2:
        comm.recv(incoming, left)
        comm.send(tensor, right)
    else:
        comm.send(tensor, right)
        comm.recv(incoming, left)
    return incoming


def by_parity_the_other_way(comm, tensor):
    (right, left), incoming = neighbours(comm), torch.zeros_like(tensor)
    calls = [partial(comm.recv, incoming, left), partial(comm.send, tensor, right)]
    for call in calls if comm.rank % 2 == 0 else calls[::-1]:
        call()
    return incoming


def last_rank_last(comm, tensor):
    """Even ranks send first, but the last one receives first."""
    (right, left), incoming = neighbours(comm), torch.empty_like(tensor)
    if comm.rank % 2 == 0 and comm.rank < comm.world_size - 1:
        comm.send(tensor, right)
        comm.recv(incoming, left)
    else:
        comm.recv(incoming, left)
        comm.send(tensor, right)
    return incoming


def rank_0_first(comm, tensor):
    (right, left), incoming = neighbours(comm), torch.empty_like(tensor)
    if comm.rank == 0:
        comm.send(tensor, right)
    comm.recv(incoming, left)
    if comm.rank:
        comm.send(tensor, right)
    return incoming


def by_exchange(comm, tensor):
    right, left = neighbours(comm)
    return comm.exchange(tensor, right, torch.empty_like(tensor), left)


def to_the_left(comm, tensor):
    right, left = neighbours(comm)
    return comm.exchange(tensor, left, torch.empty_like(tensor), right)


def keeps_its_own(comm, tensor):
    by_parity(comm, tensor)
    return tensor


def all_send_first(comm, tensor):
    right, left = neighbours(comm)
    comm.send(tensor, right)
    return comm.recv(torch.empty_like(tensor), left)


def receives_from_any(comm, tensor):
    (right, left), incoming = neighbours(comm), torch.empty_like(tensor)
    if comm.rank % 2 == 0:
        comm.send(tensor, right)
    comm.recv_any(incoming, [left])
    if comm.rank % 2:
        comm.send(tensor, right)
    return incoming


# pass_in_place(comm, tensor)


def in_chunks(comm, tensor):
    right, left = neighbours(comm)
    spare = torch.empty_like(tensor[: -(-len(tensor) // 8)])
    for segment in tensor.chunk(8):
        segment.copy_(comm.exchange(segment, right, spare[: len(segment)], left))


def in_split_parts(comm, tensor):
    right, left = neighbours(comm)
    for segment in tensor.tensor_split(8):
        incoming = torch.empty_like(segment)
        comm.exchange(segment, right, incoming, left)
        segment[:] = incoming
        del incoming


def only_one_waits(comm, tensor):
    """Rank 0 keeps what comes in until its own segment is gone; nobody else has to."""
    right, left = neighbours(comm)
    for part in tensor.tensor_split(8):
        if comm.rank:
            comm.send(part, right)
            comm.recv(part, left)
        else:
            incoming = comm.recv(torch.empty_like(part), left)
            comm.send(part, right)
            part.copy_(incoming)
            del incoming


def by_bounds(*, comm, tensor):
    right, left = neighbours(comm)
    size = math.ceil(tensor.numel() / 8)
    spare = tensor.new_zeros(size)
    for begin in range(0, tensor.numel(), size):
        end = min(begin + size, tensor.numel())
        comm.exchange(tensor[begin:end], right, spare[: end - begin], left)
        tensor[begin:end] = spare[: end - begin]


def with_a_numpy_spare(comm, tensor):
    right, left = neighbours(comm)
    spare = np.empty(-(-len(tensor) // 8), dtype=np.float32)
    values = tensor.numpy()
    for begin in range(0, len(values), len(spare)):
        part = values[begin : begin + len(spare)]
        incoming = spare[: len(part)]
        comm.exchange(torch.from_numpy(part), right, torch.from_numpy(incoming), left)
        part[...] = incoming


def recursively(comm, tensor, left_over=8):
    right, left = neighbours(comm)
    part, rest = tensor.tensor_split([math.ceil(len(tensor) / left_over)])
    part.copy_(comm.exchange(part, right, torch.empty_like(part), left))
    if len(rest):
        recursively(comm, rest, left_over - 1)


def passes_all_in_place(comm, tensor):
    recursively(comm, tensor)


def in_a_spare_tensor(comm, tensor):
    tensor.copy_(by_exchange(comm, tensor))


def clones_segments(comm, tensor):
    right, left = neighbours(comm)
    for part in tensor.chunk(8):
        part.copy_(comm.exchange(part.clone(), right, torch.empty_like(part), left))


def hides_it_in_numpy(comm, tensor):
    right, left = neighbours(comm)
    spare = torch.from_numpy(np.empty(len(tensor), dtype=np.float32))
    tensor.copy_(comm.exchange(tensor, right, spare, left))


def in_sixteen(comm, tensor):
    right, left = neighbours(comm)
    for part in tensor.tensor_split(16):
        part.copy_(comm.exchange(part, right, torch.empty_like(part), left))


def to_the_left_in_place(comm, tensor):
    tensor.copy_(to_the_left(comm, tensor))


# same_bits(comm, tensor)


def exact_up_rounded_down(comm, tensor):
    total = tensor.double().sum()
    if comm.rank:
        comm.send(total, 0)
        return comm.recv(torch.empty(()), 0)
    for rank in range(1, comm.world_size):
        total += comm.recv(torch.empty_like(total), rank)
    for rank in range(1, comm.world_size):
        comm.send(total.float(), rank)
    return total.float()


def as_a_number(comm, tensor):
    return exact_up_rounded_down(comm, tensor).item()


def in_a_list(comm, tensor):
    return exact_up_rounded_down(comm, tensor).view(1)


def in_whole_numbers(comm, tensor):
    """Multiples of 1/256 are integers."""
    total = (tensor.double() * 256).long().sum().view(1)
    collectives.reduce(comm, total, 0)
    rounded = (total.double() / 256).float()
    return collectives.broadcast(comm, rounded, 0).item()


def with_fsum(comm, tensor):
    total = torch.tensor([math.fsum(tensor.tolist())], dtype=torch.float64)
    collectives.reduce(comm, total, 0)
    return float(collectives.broadcast(comm, total.float(), 0))


def exact_along_a_chain(comm, tensor):
    total = tensor.to(torch.float64).sum().view(1)
    last = comm.world_size - 1
    if comm.rank:
        total += comm.recv(torch.empty_like(total), comm.rank - 1)
    rounded = total.float()
    if comm.rank < last:
        comm.send(total, comm.rank + 1)
        comm.recv(rounded, comm.rank + 1)
    if comm.rank:
        comm.send(rounded, comm.rank - 1)
    return rounded[0]


def exact_both_ways(comm, tensor):
    return collectives.naive_all_reduce(comm, tensor.double().sum().view(1)).item()


def rounds_each_part(comm, tensor):
    return collectives.naive_all_reduce(comm, tensor.double().sum().float().view(1)).item()


def sums_its_own(comm, tensor):
    return tensor.double().sum().item()


def returns_all_sums(comm, tensor):
    return tensor.double()


# broadcast(comm, tensor)


def by_doubling(comm, tensor):
    know = 1
    while know < comm.world_size:
        if comm.rank < know and comm.rank + know < comm.world_size:
            comm.send(tensor, comm.rank + know)
        elif know <= comm.rank < 2 * know:
            comm.recv(tensor, comm.rank - know)
        know *= 2
    return tensor


def by_halves(comm, tensor):
    """Recursion: the first rank of a range tells the first of its second half."""
    tensor = tensor.clone()

    def tell(first, end):
        if end - first < 2:
            return
        middle = first + (end - first + 1) // 2
        if comm.rank == first:
            comm.send(tensor, middle)
        elif comm.rank == middle:
            comm.recv(tensor, first)
        tell(*((first, middle) if comm.rank < middle else (middle, end)))

    tell(0, comm.world_size)
    return tensor


def by_bits(comm, tensor):
    """A rank hears from the one without its highest bit."""
    begin = comm.rank.bit_length()
    if comm.rank:
        comm.recv(tensor, comm.rank ^ 1 << begin - 1)
    for bit in range(begin, comm.world_size.bit_length()):
        if comm.rank | 1 << bit < comm.world_size:
            comm.send(tensor, comm.rank | 1 << bit)
    return tensor


def root_tells_all(comm, tensor):
    if comm.rank:
        return comm.recv(tensor, 0)
    for rank in range(1, comm.world_size):
        comm.send(tensor, rank)
    return tensor


def from_neighbour_to_neighbour(comm, tensor):
    if comm.rank:
        comm.recv(tensor, comm.rank - 1)
    if comm.rank < comm.world_size - 1:
        comm.send(tensor, comm.rank + 1)
    return tensor


def two_chains(comm, tensor):
    """Half the rounds of one chain: rank 0 tells the first of the second half, too."""
    half = comm.world_size // 2
    if comm.rank:
        comm.recv(tensor, 0 if comm.rank == half else comm.rank - 1)
    else:
        comm.send(tensor, half)
    if comm.rank + 1 not in (half, comm.world_size):
        comm.send(tensor, comm.rank + 1)
    return tensor


def tells_nobody(comm, tensor):
    return tensor


# prefix_sum(comm, tensor)


def hillis_steele(comm, tensor):
    total, distance = tensor.clone(), 1
    while distance < comm.world_size:
        before, after = comm.rank - distance, comm.rank + distance
        incoming = torch.zeros_like(total)
        if before >= 0 and after < comm.world_size:
            comm.exchange(total, after, incoming, before)
        elif before >= 0:
            comm.recv(incoming, before)
        elif after < comm.world_size:
            comm.send(total, after)
        total += incoming
        distance *= 2
    return total


def around_the_circle(comm, tensor):
    """All exchange; what comes from the end of the circle is not added."""
    total = tensor
    for step in range(math.ceil(math.log2(comm.world_size))):
        to, source = comm.rank + 2**step, comm.rank - 2**step
        incoming = torch.empty_like(tensor)
        comm.exchange(total, to % comm.world_size, incoming, source % comm.world_size)
        total = total + incoming if source >= 0 else total
    return total


def in_double(comm, tensor):
    return hillis_steele(comm, tensor.double())


def prefix_in_a_row(comm, tensor):
    if comm.rank:
        tensor += comm.recv(torch.empty_like(tensor), comm.rank - 1)
    if comm.rank < comm.world_size - 1:
        comm.send(tensor, comm.rank + 1)
    return tensor


def without_its_own(comm, tensor):
    return hillis_steele(comm, tensor) - tensor


def from_the_end(comm, tensor):
    total = collectives.naive_all_reduce(comm, tensor.clone())
    return total - hillis_steele(comm, tensor) + tensor


def sums_all(comm, tensor):
    return collectives.naive_all_reduce(comm, tensor)


def stops_after_one_step(comm, tensor):
    left = by_exchange(comm, tensor)
    return tensor + left if comm.rank else tensor


# all_gather(comm, tensor)


def bruck(comm, tensor):
    P, rank, have = comm.world_size, comm.rank, [tensor]
    while len(have) < P:
        distance, count = len(have), min(len(have), P - len(have))
        incoming = torch.empty(count, len(tensor))
        dst, src = (rank - distance) % P, (rank + distance) % P
        have += comm.exchange(torch.stack(have[:count]), dst, incoming, src)
    return [have[(r - rank) % P] for r in range(P)]


def bruck_the_other_way(comm, tensor):
    """The tensors before its own, in one matrix."""
    P, rank = comm.world_size, comm.rank
    have, count = torch.empty(P, len(tensor)), 1
    have[0] = tensor
    while count < P:
        more = min(count, P - count)
        dst, src = (rank + count) % P, (rank - count) % P
        comm.exchange(have[:more], dst, have[count : count + more], src)
        count += more
    return have[[(rank - r) % P for r in range(P)]]


def in_a_dict(comm, tensor):
    P, rank, have = comm.world_size, comm.rank, {comm.rank: tensor}
    while len(have) < P:
        distance = len(have)
        mine = [(rank + i) % P for i in range(min(distance, P - distance))]
        theirs = [(source + distance) % P for source in mine]
        sent = torch.cat([have[source] for source in mine])
        dst, src = (rank - distance) % P, (rank + distance) % P
        came = comm.exchange(sent, dst, torch.empty_like(sent), src).chunk(len(mine))
        have |= dict(zip(theirs, came))
    yield from (have[source] for source in sorted(have))


def gathers_around_a_ring(comm, tensor):
    (right, left), P = neighbours(comm), comm.world_size
    found = [tensor] * P
    for step in range(P - 1):
        sent = found[(comm.rank - step) % P]
        found[left - step] = comm.exchange(sent, right, torch.empty_like(sent), left)
    return found


def gathers_and_spreads(comm, tensor):
    P, rank = comm.world_size, comm.rank
    found = torch.zeros(P, len(tensor))
    found[rank] = tensor
    if rank:
        comm.send(tensor, 0)
        return comm.recv(found, 0)
    for source in range(1, P):
        comm.recv(found[source], source)
    for other in range(1, P):
        comm.send(found, other)
    return found


def rotated(way):
    def gathers(comm, tensor):
        found = bruck(comm, tensor)
        return [found[(comm.rank + way * i) % len(found)] for i in range(len(found))]

    return gathers


# long_broadcast(comm, tensor)


def through_a_chain(comm, segments):
    before, after = comm.rank - 1, comm.rank + 1
    last = after == comm.world_size
    for number, segment in enumerate(segments):
        if comm.rank == 0:
            comm.send(segment, after)
        elif last or number == 0:
            comm.recv(segment, before)
        else:
            comm.exchange(segments[number - 1], after, segment, before)
    if comm.rank and not last:
        comm.send(segments[-1], after)


def best_number(comm, tensor):
    return max(1, round(math.sqrt((comm.world_size - 2) * tensor.nbytes / 1000)))


def in_segments(comm, tensor):
    through_a_chain(comm, tensor.tensor_split(best_number(comm, tensor)))


def in_segments_by_keyword(*, comm, tensor):
    in_segments(comm, tensor)


def in_segments_and_returned(comm, tensor):
    in_segments(comm, tensor)
    return tensor


def by_trying_all(comm, tensor):
    """The number of segments with the shortest time by the formula."""
    P = comm.world_size
    time = {n: (n + P - 2) * (1 + tensor.nbytes / n / 1000) for n in range(1, 50)}
    through_a_chain(comm, tensor.tensor_split(min(time, key=time.get)))


def a_few_more_segments(comm, tensor):
    size = -(-len(tensor) // (best_number(comm, tensor) + 1))
    through_a_chain(comm, tensor.split(size))


def in_reverse(comm, tensor):
    """The last segment first."""
    through_a_chain(comm, tensor.chunk(best_number(comm, tensor))[::-1])


def in_a_tree(comm, tensor):
    by_doubling(comm, tensor)


def in_one_piece(comm, tensor):
    through_a_chain(comm, [tensor])


def number_by_number(comm, tensor):
    through_a_chain(comm, tensor.tensor_split(min(len(tensor), 200)))


def one_after_another(comm, tensor):
    """Each rank passes on a segment before it receives the next."""
    for segment in tensor.tensor_split(best_number(comm, tensor)):
        from_neighbour_to_neighbour(comm, segment)


def sends_nothing(comm, tensor):
    pass


# reduce_blocks(comm, blocks)


def by_halving(comm, blocks):
    P, rank = comm.world_size, comm.rank
    mine = blocks.roll(-rank, 0)  # row i is the block of rank + i
    while len(mine) > 1:
        keep = (len(mine) + 1) // 2
        leaving = mine[keep:]
        incoming = torch.empty_like(leaving)
        comm.exchange(leaving, (rank + keep) % P, incoming, (rank - keep) % P)
        mine = mine[:keep].clone()
        mine[: len(incoming)] += incoming
    return mine[0]


def halving_in_numpy(comm, blocks):
    return by_halving(comm, blocks).numpy()


def halving_by_keyword(*, blocks, comm):
    return by_halving(comm, blocks)


def halving_into_a_row(comm, blocks):
    blocks[comm.rank] = by_halving(comm, blocks)
    return blocks[comm.rank].tolist()


def halving_in_a_list(comm, blocks):
    P, rank = comm.world_size, comm.rank
    mine = [blocks[(rank + i) % P] for i in range(P)]
    while (count := len(mine)) > 1:
        keep = -(-count // 2)
        incoming = torch.empty(count - keep, blocks.shape[1])
        comm.exchange(torch.stack(mine[keep:]), (rank + keep) % P, incoming, (rank - keep) % P)
        came = [*incoming, *[0] * (2 * keep - count)]
        mine = [one + other for one, other in zip(mine, came)]
    return mine[0]


def halving_to_the_left(comm, blocks):
    """The mirror image: row i is the block of rank - i."""
    P, rank = comm.world_size, comm.rank
    mine = blocks[[(rank - i) % P for i in range(P)]]
    while len(mine) > 1:
        keep = (len(mine) + 1) // 2
        incoming = torch.empty_like(mine[keep:])
        comm.exchange(mine[keep:], (rank - keep) % P, incoming, (rank + keep) % P)
        mine[: len(incoming)] += incoming
        mine = mine[:keep]
    return mine[0]


def block_by_block(comm, blocks):
    """Directly from rank to rank, in P - 1 rounds."""
    P, rank = comm.world_size, comm.rank
    total = blocks[rank].clone()
    for step in range(1, P):
        dst, src = (rank + step) % P, (rank - step) % P
        total += comm.exchange(blocks[dst], dst, torch.empty_like(total), src)
    return total


def reduces_everything(comm, blocks):
    return in_census(comm, blocks)[comm.rank]


def keeps_its_own_block(comm, blocks):
    return blocks[comm.rank]


def block_of_the_next(comm, blocks):
    return by_halving(comm, blocks.roll(-1, 0))


# all_reduce(comm, tensor)


def in_census(comm, tensor):
    P, rank = comm.world_size, comm.rank
    before, count = torch.zeros_like(tensor), 0  # the sum over the count ranks before this one
    for bit in map(int, f"{P - 1:b}"):
        distance = count + bit
        sent = before + tensor if bit else before
        incoming = torch.empty_like(tensor)
        comm.exchange(sent, (rank + distance) % P, incoming, (rank - distance) % P)
        before = before + incoming
        count += distance
    return before + tensor


def census_to_the_left(comm, tensor):
    P, rank = comm.world_size, comm.rank
    after, with_own, count = None, tensor, 0
    for bit in range((P - 1).bit_length() - 1, -1, -1):
        odd = P - 1 >> bit & 1
        distance = count + odd
        sent = with_own if odd else after
        came = comm.exchange(
            sent, (rank - distance) % P, torch.empty_like(tensor), (rank + distance) % P
        )
        after = came if after is None else after + came
        with_own, count = after + tensor, count + distance
    return with_own


def census_in_double(comm, tensor):
    return in_census(comm, tensor.double())


def by_folding(comm, tensor):
    """Recursive doubling on the largest power of two; the other ranks go before and after."""
    P, rank = comm.world_size, comm.rank
    power = 1 << P.bit_length() - 1
    if rank >= power:
        comm.send(tensor, rank - power)
        return comm.recv(tensor, rank - power)
    if rank + power < P:
        tensor += comm.recv(torch.empty_like(tensor), rank + power)
    for bit in range(power.bit_length() - 1):
        peer = rank ^ 1 << bit
        tensor = tensor + comm.exchange(tensor, peer, torch.empty_like(tensor), peer)
    if rank + power < P:
        comm.send(tensor, rank + power)
    return tensor


def doubles_around_the_circle(comm, tensor):
    """Right for powers of two; elsewhere some ranks count twice."""
    for step in range(math.ceil(math.log2(comm.world_size))):
        dst, src = comm.rank + 2**step, comm.rank - 2**step
        incoming = torch.empty_like(tensor)
        comm.exchange(tensor, dst % comm.world_size, incoming, src % comm.world_size)
        tensor = tensor + incoming
    return tensor


def rotates(comm, tensor):
    total, passing = tensor.clone(), tensor
    for _ in range(comm.world_size - 1):
        passing = by_exchange(comm, passing)
        total += passing
    return total


GATHERED = [bruck, bruck_the_other_way, in_a_dict]
GATHERED += [lambda comm, tensor: tuple(bruck(comm, tensor))]
GATHERED += [lambda comm, tensor: torch.stack(bruck(comm, tensor)).numpy()]
GATHERED += [lambda *, comm, tensor: dict(enumerate(bruck(comm, tensor))).values()]

ANSWERS = [
    Answers(
        check.puzzles.largest,
        [
            *(through_rank_0, along_a_chain, by_the_library, with_sorted_numpy),
            *in_clothes(through_rank_0)[1:],
        ],
        [
            (sends_all, "score.above"),
            (asks_everyone, "score.above"),
            (looks_at_its_own, "puzzle.own"),
            (starts_at_zero, "puzzle.zero"),
            (by_magnitude, "puzzle.magnitude"),
        ],
        6,
    ),
    Answers(
        check.puzzles.pass_on,
        [*in_clothes(by_parity), by_parity_the_other_way, last_rank_last],
        [
            (rank_0_first, "score.above", "score.neighbours"),
            (by_exchange, "puzzle.exchange"),
            (to_the_left, "puzzle.from_the_right"),
            (keeps_its_own, "puzzle.own"),
            (receives_from_any, "score.untold"),
            (all_send_first, "run.stuck"),
        ],
        6,
    ),
    Answers(
        check.puzzles.pass_in_place,
        [
            *(in_chunks, in_split_parts, only_one_waits),
            *(by_bounds, with_a_numpy_spare, passes_all_in_place),
        ],
        [
            (in_a_spare_tensor, "score.above"),
            (clones_segments, "score.above"),
            (hides_it_in_numpy, "score.above"),
            (in_sixteen, "traffic.off_target"),
            (to_the_left_in_place, "puzzle.from_the_right"),
            (by_exchange, "value.new_tensor"),
        ],
        6,
    ),
    Answers(
        check.puzzles.same_bits,
        [
            *(exact_up_rounded_down, as_a_number, in_a_list),
            *(in_whole_numbers, with_fsum, exact_along_a_chain),
        ],
        [
            (exact_both_ways, "score.above", "80 bytes"),
            (rounds_each_part, "puzzle.rounded"),
            (sums_its_own, "puzzle.other_sum"),
            (returns_all_sums, "puzzle.no_number"),
        ],
        6,
    ),
    Answers(
        check.puzzles.broadcast,
        [*in_clothes(by_doubling), by_halves, by_bits],
        [
            (root_tells_all, "score.through_one"),
            (from_neighbour_to_neighbour, "score.neighbours"),
            (two_chains, "score.above", "4 rounds"),
            (tells_nobody, "puzzle.own"),
        ],
        8,
    ),
    Answers(
        check.puzzles.prefix_sum,
        [*in_clothes(hillis_steele), around_the_circle, in_double],
        [
            (prefix_in_a_row, "score.neighbours"),
            (without_its_own, "puzzle.exclusive"),
            (from_the_end, "puzzle.suffix"),
            (sums_all, "puzzle.total"),
            (stops_after_one_step, "puzzle.two_alone"),
        ],
        6,
    ),
    Answers(
        check.puzzles.all_gather,
        GATHERED,
        [
            (gathers_around_a_ring, "score.neighbours"),
            (gathers_and_spreads, "traffic.off_target"),
            (rotated(1), "puzzle.own_first"),
            (rotated(-1), "puzzle.backwards"),
        ],
        6,
    ),
    Answers(
        check.puzzles.long_broadcast,
        [
            *(in_segments, in_segments_by_keyword, in_segments_and_returned),
            *(by_trying_all, a_few_more_segments, in_reverse),
        ],
        [
            (in_a_tree, "score.above", "99 ms"),
            (in_one_piece, "score.above", "165 ms"),
            (number_by_number, "score.above"),
            (one_after_another, "score.above"),
            (sends_nothing, "value.unchanged"),
        ],
        6,
    ),
    Answers(
        check.puzzles.reduce_blocks,
        [
            *(by_halving, halving_in_numpy, halving_by_keyword),
            *(halving_into_a_row, halving_in_a_list, halving_to_the_left),
        ],
        [
            (block_by_block, "score.above", "5 rounds"),
            (reduces_everything, "traffic.off_target"),
            (keeps_its_own_block, "puzzle.own"),
            (block_of_the_next, "puzzle.next_block"),
        ],
        6,
    ),
    Answers(
        check.puzzles.all_reduce,
        [*in_clothes(in_census), census_to_the_left, census_in_double],
        [
            (by_folding, "score.above", "4 rounds"),
            (rotates, "score.neighbours"),
            (doubles_around_the_circle, "sum.twice"),
        ],
        6,
    ),
]
