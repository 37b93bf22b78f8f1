"""Answers to ``check.hosts``."""

import re
from collections import Counter
from itertools import accumulate

import torch
from graded import Answers
from ranks import travel_by_value

from labkit.collectives import ring_all_reduce
from workbook import check

travel_by_value(__name__)


# inside(comm, chunks, host)


def inside(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        if comm.rank != owner:
            comm.send(chunk, owner)
            continue
        for other in host:
            if other != owner:
                chunk += comm.recv(torch.empty_like(chunk), other)


def inside_with_recv_add(comm, chunks, host):
    others = [rank for rank in host if rank != comm.rank]
    for owner, chunk in [*zip(host, chunks)][::-1]:
        if comm.rank == owner:
            for other in others[::-1]:
                comm.recv_add(chunk, other)
        else:
            comm.send(tensor=chunk, dst=owner)


def inside_whoever_comes(comm, chunks, host):
    for place, chunk in enumerate(chunks):
        waiting, incoming = {*host} - {host[place]}, torch.empty_like(chunk)
        if comm.rank != host[place]:
            comm.send(chunk, host[place])
            continue
        while waiting:
            waiting.remove(comm.recv_any(incoming, waiting))
            chunk.add_(incoming)


def inside_in_turns(comm, chunks, host):
    """Everybody sends in every turn where everybody has a chunk."""
    m, place = len(host), host.index(comm.rank)
    if len(chunks) < m:
        inside(comm, chunks, host)
        return
    own = chunks[place]
    for turn in range(1, m):
        to, source = (place + turn) % m, (place - turn) % m
        incoming = torch.empty_like(own)
        comm.exchange(chunks[to], host[to], incoming, host[source])
        own += incoming


def inside_by_a_ring(comm, chunks, host):
    m, place = len(host), host.index(comm.rank)
    if len(chunks) < m:
        inside(comm, chunks, host)
        return
    for step in range(m - 1):
        target = chunks[(place - step - 2) % m]
        incoming = torch.empty_like(target)
        sent = chunks[(place - step - 1) % m]
        comm.exchange(sent, host[(place + 1) % m], incoming, host[place - 1])
        target += incoming


def inside_in_numpy(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        array = chunk.numpy()
        if comm.rank != owner:
            comm.send(torch.from_numpy(array.copy()), owner)
        else:
            for other in set(host) - {owner}:
                array += comm.recv(torch.zeros(len(array)), other).numpy()


def inside_by_keyword(*, host, chunks, comm, number=0):
    if number < len(chunks):
        inside(comm, [chunks[number]], (host[number], *(r for r in host if r != host[number])))
        inside_by_keyword(host=host, chunks=chunks, comm=comm, number=number + 1)


def inside_overwrites(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        if comm.rank != owner:
            comm.send(chunk, owner)
        for other in host if comm.rank == owner else ():
            if other != owner:
                comm.recv(chunk, other)


def inside_leaves_the_last_out(comm, chunks, host):
    inside(comm, chunks, host[:-1]) if comm.rank in host[:-1] else None


def inside_takes_the_mean(comm, chunks, host):
    inside(comm, chunks, host)
    for owner, chunk in zip(host, chunks):
        chunk /= len(host) if comm.rank == owner else 1


def inside_makes_new_ones(comm, chunks, host):
    for i, owner in enumerate(host[: len(chunks)]):
        if comm.rank != owner:
            comm.send(chunks[i], owner)
            continue
        for other in set(host) - {owner}:
            chunks[i] = chunks[i] + comm.recv(torch.empty_like(chunks[i]), other)


def inside_all_send_first(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        for other in set(host) - {comm.rank}:
            comm.send(chunk, other)
        if comm.rank == owner:
            chunk += comm.recv(torch.empty_like(chunk), host[0])


def inside_sums_over_all_hosts(comm, chunks, host):
    for chunk in chunks:
        ring_all_reduce(comm, chunk)


def inside_to_the_next(comm, chunks, host):
    """Chunk i to the rank after its own."""
    inside(comm, chunks, (*host[1:], host[0]))


def inside_to_one(comm, chunks, host):
    for chunk in chunks:
        inside(comm, [chunk], host)


def inside_sends_all_chunks(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        whole = torch.cat(chunks)
        if comm.rank != owner:
            comm.send(whole, owner)
            continue
        for other in set(host) - {owner}:
            came = comm.recv(torch.empty_like(whole), other).split([len(c) for c in chunks])
            chunk += came[host.index(owner)]


def inside_adds_its_own_twice(comm, chunks, host):
    own = [chunk.clone() for chunk in chunks]
    inside(comm, chunks, host)
    for owner, chunk, mine in zip(host, chunks, own):
        chunk += mine if comm.rank == owner else 0


INSIDE = [
    (inside_overwrites, "sum.overwritten"),
    (inside_leaves_the_last_out, "value.unchanged", "traffic.nothing"),
    (inside_takes_the_mean, "sum.scaled", "it is 0.5 times the expected value"),
    (inside_makes_new_ones, "value.new_chunks"),
    (inside_all_send_first, "run.stuck"),
    (inside_sums_over_all_hosts, "hosts.over_all", "peers.wrong"),
    (inside_to_the_next, "value.unchanged"),
    (inside_to_one, "value.unchanged"),
    (inside_sends_all_chunks, "bytes.whole_tensor"),
    (inside_adds_its_own_twice, "sum.own_twice"),
]


# between(comm, chunk, peers)


def between(comm, chunk, peers, to=1):
    H, place = len(peers), peers.index(comm.rank)
    dst, src = peers[(place + to) % H], peers[(place - to) % H]
    pieces = chunk.tensor_split(H)
    for step in range(H - 1):
        target = pieces[(place - to * (step + 1)) % H]
        incoming = torch.empty_like(target)
        comm.exchange(pieces[(place - to * step) % H], dst, incoming, src)
        target += incoming
    for step in range(H - 1):
        sent, received = (place + to - to * step) % H, (place - to * step) % H
        comm.exchange(pieces[sent], dst, pieces[received], src)


def between_to_the_left(comm, chunk, peers):
    between(comm, chunk, peers, to=-1)


def between_padded(comm, chunk, peers):
    H = len(peers)
    padded = torch.zeros(-(-len(chunk) // H) * H)
    padded[: len(chunk)] = chunk
    between(comm, padded, peers)
    chunk.copy_(padded[: len(chunk)])


def between_in_turns(comm, chunk, peers):
    """Every rank serves its own piece: what comes is added, and sent back to all."""
    H, place = len(peers), peers.index(comm.rank)
    pieces = chunk.tensor_split(H)
    own = pieces[place]
    for turn in range(1, H):
        to, source = (place + turn) % H, (place - turn) % H
        incoming = torch.empty_like(own)
        comm.exchange(pieces[to], peers[to], incoming, peers[source])
        own += incoming
    for turn in range(1, H):
        to, source = (place + turn) % H, (place - turn) % H
        comm.exchange(own, peers[to], pieces[source], peers[source])


def between_even_first(comm, chunk, peers):
    """Sends and receives one after the other."""
    H, place = len(peers), peers.index(comm.rank)
    right, left = peers[(place + 1) % H], peers[place - 1]
    pieces = chunk.tensor_split(H)
    for step in range(2 * H - 2):
        sent, target = pieces[(place - step) % H], pieces[(place - step - 1) % H]
        incoming = torch.empty_like(target)
        first, then = (comm.send, sent, right), (comm.recv, incoming, left)
        for way, tensor, peer in (first, then) if place % 2 == 0 else (then, first):
            way(tensor, peer)
        target.copy_(incoming + target if step < H - 1 else incoming)


def between_half_by_a_reduction(comm, chunk, peers):
    H, place = len(peers), peers.index(comm.rank)
    pieces = list(chunk.tensor_split(H))
    for first, adds in ((place, True), (place + 1, False)):
        for step in range(H - 1):
            target = (first - step - 1) % H
            buffer = pieces[target].clone()
            out = pieces[(first - step) % H].clone()
            comm.exchange(out, peers[(place + 1) % H], buffer, peers[place - 1])
            torch.add(buffer, pieces[target], alpha=float(adds), out=pieces[target])


class Between:
    def __call__(self, comm, chunk, peers):
        between(comm, chunk, list(peers))


def between_with_all(comm, chunk, peers):
    """The whole chunk to every peer: as good with two hosts, and too much with three."""
    H, place, own = len(peers), peers.index(comm.rank), chunk.clone()
    for turn in range(1, H):
        to, source = peers[(place + turn) % H], peers[(place - turn) % H]
        chunk += comm.exchange(own, to, torch.empty_like(own), source)


def between_overwrites(comm, chunk, peers):
    H, place, own = len(peers), peers.index(comm.rank), chunk.clone()
    comm.exchange(own, peers[(place + 1) % H], chunk, peers[place - 1])


def between_neighbours_alone(comm, chunk, peers):
    H, place, own = len(peers), peers.index(comm.rank), chunk.clone()
    chunk += comm.exchange(own, peers[(place + 1) % H], torch.empty_like(own), peers[place - 1])


def between_first_half(comm, chunk, peers):
    H, place = len(peers), peers.index(comm.rank)
    pieces = chunk.tensor_split(H)
    for step in range(H - 1):
        target = pieces[(place - step - 1) % H]
        incoming = torch.empty_like(target)
        comm.exchange(
            pieces[(place - step) % H], peers[(place + 1) % H], incoming, peers[place - 1]
        )
        target += incoming


def between_takes_the_mean(comm, chunk, peers):
    between(comm, chunk, peers)
    chunk /= len(peers)


def between_binds_anew(comm, chunk, peers):
    chunk = chunk.clone()
    between(comm, chunk, peers)
    return chunk


def between_all_receive_first(comm, chunk, peers):
    H, place = len(peers), peers.index(comm.rank)
    comm.recv(torch.empty_like(chunk), peers[place - 1])
    comm.send(chunk, peers[(place + 1) % H])


def between_does_nothing(comm, chunk, peers):
    pass


def between_through_the_first(comm, chunk, peers):
    hub = peers[0]
    for other in peers[1:]:
        if comm.rank == hub:
            chunk += comm.recv(torch.empty_like(chunk), other)
        elif comm.rank == other:
            comm.send(chunk, hub)
    for other in peers[1:]:
        if comm.rank == hub:
            comm.send(chunk, other)
        elif comm.rank == other:
            comm.recv(chunk, hub)


def between_its_rank_in_all(comm, chunk, peers):
    """Takes its rank for its place in the circle."""
    H, place = len(peers), comm.rank % len(peers)
    pieces = chunk.tensor_split(H)
    for step in range(H - 1):
        target = pieces[(place - step - 1) % H]
        incoming = torch.empty_like(target)
        comm.exchange(
            pieces[(place - step) % H], peers[(place + 1) % H], incoming, peers[(place - 1) % H]
        )
        target += incoming


BETWEEN = [
    (between_with_all, "traffic.off_target"),
    (between_overwrites, "sum.overwritten"),
    (between_neighbours_alone, "sum.lacks_one"),
    (between_first_half, "value.numbers"),
    (between_takes_the_mean, "sum.scaled"),
    (between_binds_anew, "value.new_tensor"),
    (between_all_receive_first, "run.stuck"),
    (between_does_nothing, "value.unchanged", "traffic.nothing"),
    (between_through_the_first, "traffic.off_target"),
    (between_its_rank_in_all, "run.error", "cannot send to itself"),
]


# all_reduce(comm, tensor, hosts)


def share_inside(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        if comm.rank != owner:
            comm.recv(chunk, owner)
            continue
        for other in host:
            if other != owner:
                comm.send(chunk, other)


def over_hosts(comm, tensor, hosts, steps=(inside, between, share_inside), parts=None):
    first, second, last = steps
    host = next(host for host in hosts if comm.rank in host)
    chunks = tensor.view(-1).tensor_split(parts or min(map(len, hosts)))
    place = host.index(comm.rank)
    first(comm, chunks, host)
    if place < len(chunks):
        second(comm, chunks[place], [other[place] for other in hosts])
    last(comm, chunks, host)


def as_on_the_page(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts)


def by_a_leader(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts, parts=1)


def by_the_last_of_each_host(comm, tensor, hosts):
    over_hosts(comm, tensor, [host[::-1] for host in hosts], parts=1)


def with_other_pieces(comm, tensor, hosts):
    steps = inside_whoever_comes, between_in_turns, share_inside
    over_hosts(comm, tensor, hosts, steps)


def as_a_clone(*, hosts, comm, tensor):
    flat = tensor.clone()
    over_hosts(comm, flat, hosts, (inside_with_recv_add, between_padded, share_inside))
    tensor[:] = flat


def in_blocks_of_its_own(comm, tensor, hosts):
    """Each rank of the smallest host one block after the other."""
    for block in tensor.tensor_split(2):
        over_hosts(comm, block, hosts, (inside_in_turns, between_even_first, share_inside))


def through_one_host(comm, tensor, hosts):
    """Two hosts: by halves. More: by a ring of leaders."""
    parts = 1 if len(hosts) > 2 else None
    over_hosts(comm, tensor, hosts[::-1], parts=parts)


def around_all_ranks(comm, tensor, hosts):
    between(comm, tensor, list(range(comm.world_size)))


def each_rank_crosses(comm, tensor, hosts):
    """Between first, the whole tensor of every rank, then inside."""
    host = next(host for host in hosts if comm.rank in host)
    own = tensor.clone()
    other = hosts[1 - hosts.index(host)][host.index(comm.rank)]
    tensor += comm.exchange(own, other, torch.empty_like(own), other)
    inside(comm, [tensor], host)
    share_inside(comm, [tensor], host)


def through_rank_0(comm, tensor, hosts):
    inside(comm, [tensor], tuple(range(comm.world_size)))
    share_inside(comm, [tensor], tuple(range(comm.world_size)))


def leaders_tell_all_leaders(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts, (inside, between_in_order, share_inside), parts=1)


def between_in_order(comm, chunk, peers):
    """Everybody gets everything, and adds it up in the same order."""
    H, place, came = len(peers), peers.index(comm.rank), {comm.rank: chunk.clone()}
    for turn in range(1, H):
        to, source = peers[(place + turn) % H], peers[(place - turn) % H]
        came[source] = comm.exchange(came[comm.rank], to, torch.empty_like(chunk), source)
    chunk.copy_(torch.stack([came[peer] for peer in peers]).sum(0))


def in_another_order_on_each_host(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts, (inside, between_with_all, share_inside), parts=1)


def keeps_it_to_itself(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts, (inside, between, lambda *args: None))


def forgets_the_others_at_home(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts, (lambda *args: None, between, share_inside))


def stays_at_home(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts, (inside, between_does_nothing, share_inside))


def takes_the_mean(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts)
    tensor /= comm.world_size


def cuts_by_its_own_host(comm, tensor, hosts):
    host = next(host for host in hosts if comm.rank in host)
    chunks, place = tensor.tensor_split(len(host)), host.index(comm.rank)
    inside(comm, chunks, host)
    between(comm, chunks[place], [other[place % len(other)] for other in hosts])


def leaves_the_rest_out(comm, tensor, hosts):
    size = len(tensor) // min(map(len, hosts)) * min(map(len, hosts))
    over_hosts(comm, tensor[: size - 1], hosts)


ALL_REDUCE = [
    (around_all_ranks, "cards.flat"),
    (each_rank_crosses, "cards.every_rank", "each of its 2 ranks"),
    (keeps_it_to_itself, "hosts.not_shared"),
    (forgets_the_others_at_home, "hosts.not_inside"),
    (stays_at_home, "sum.lacks"),
    (takes_the_mean, "sum.mean"),
    (leaves_the_rest_out, "value.numbers"),
]

ON_SIX = [
    (through_rank_0, "cards.whole", "that is 5 times a whole tensor"),
    (leaders_tell_all_leaders, "cards.whole", "that is 2 times a whole tensor"),
    (in_another_order_on_each_host, "value.last_bits"),
    (cuts_by_its_own_host, "run.stuck"),
    (around_all_ranks, "cards.flat"),
]


# place(environment)


def place(environment):
    if "RANK" in environment:
        return tuple(int(environment[n]) for n in ("RANK", "LOCAL_RANK", "GROUP_RANK"))
    rank, nodes = int(environment["SLURM_PROCID"]), []
    for part in environment["SLURM_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        nodes += [int(count)] * int(times or 1)
    local_rank, host = rank, 0
    while local_rank >= nodes[host]:
        local_rank -= nodes[host]
        host += 1
    return rank, local_rank, host


def tasks_of(text):
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def place_in_a_list(environment):
    get = environment.get
    if get("LOCAL_RANK"):
        return [int(get("RANK")), int(get("LOCAL_RANK")), int(get("GROUP_RANK"))]
    hosts = [h for h, n in enumerate(tasks_of(get("SLURM_TASKS_PER_NODE"))) for _ in range(n)]
    rank = int(get("SLURM_PROCID"))
    return [rank, hosts[:rank].count(hosts[rank]), hosts[rank]]


def place_by_sums(environment):
    try:
        return (*map(int, map(environment.__getitem__, ["RANK", "LOCAL_RANK", "GROUP_RANK"])),)
    except KeyError:
        rank = int(environment["SLURM_PROCID"])
    ends = [0, *accumulate(tasks_of(environment["SLURM_TASKS_PER_NODE"]))]
    host = sum(rank >= end for end in ends[1:])
    return rank, rank - ends[host], host


def place_by_ranges(environment):
    if set(environment) >= {"RANK", "LOCAL_RANK"}:
        return place(environment)
    first, rank = 0, int(environment["SLURM_PROCID"])
    for host, count in enumerate(tasks_of(environment["SLURM_TASKS_PER_NODE"])):
        if rank in range(first, first + count):
            return rank, rank - first, host
        first += count
    return None


def place_recursively(environment, host=0, tasks=None):
    if "GROUP_RANK" in environment:
        return place(environment)
    rank = int(environment["SLURM_PROCID"])
    tasks = tasks or tasks_of(environment["SLURM_TASKS_PER_NODE"])
    before = sum(tasks[:host])
    if rank < before + tasks[host]:
        return rank, rank - before, host
    return place_recursively(environment, host + 1, tasks)


def place_as_a_generator(environment):
    yield from place(environment)


def place_by_counting(environment):
    if "RANK" in environment:
        return place(environment)
    hosts = Counter(dict(enumerate(tasks_of(environment["SLURM_TASKS_PER_NODE"]))))
    by_rank = sorted(hosts.elements())
    rank = int(environment["SLURM_PROCID"])
    return rank, rank - by_rank.index(by_rank[rank]), by_rank[rank]


def as_if(count):
    """As if every node had ``count(tasks)`` tasks."""

    def wrong(environment):
        if "RANK" in environment:
            return place(environment)
        rank, tasks = (
            int(environment["SLURM_PROCID"]),
            tasks_of(environment["SLURM_TASKS_PER_NODE"]),
        )
        return rank, rank % count(tasks), rank // count(tasks)

    return wrong


def reads_slurm_first(environment):
    own = {name: text for name, text in environment.items() if name.startswith("SLURM")}
    return place(own or environment)


def reads_one_node(environment):
    if "RANK" in environment:
        return place(environment)
    tasks = re.sub(r"\(.*?\)", "", environment["SLURM_TASKS_PER_NODE"])
    sizes, rank, first = [int(n) for n in tasks.split(",")], int(environment["SLURM_PROCID"]), 0
    for host, count in enumerate(sizes):
        if rank < first + count:
            return rank, rank - first, host
        first += count
    return None


def host_from_one(environment):
    rank, local_rank, host = place(environment)
    return rank, local_rank, host + 1


def local_rank_is_rank(environment):
    rank, _, host = place(environment)
    return rank, rank, host


def leaves_texts(environment):
    return tuple(map(str, place(environment)))


def swaps_two(environment):
    rank, local_rank, host = place(environment)
    return rank, host, local_rank


def knows_torchrun_alone(environment):
    return tuple(int(environment[n]) for n in ("RANK", "LOCAL_RANK", "GROUP_RANK"))


def does_not_parse(environment):
    if "RANK" in environment:
        return place(environment)
    return place(environment | {"SLURM_TASKS_PER_NODE": str(int(environment["SLURM_NNODES"]))})


def returns_nothing(environment):
    place(environment)


PLACE = [
    (as_if(lambda tasks: tasks[0]), "place.even_nodes"),
    (as_if(lambda tasks: max(1, sum(tasks) // len(tasks))), "place.mean_node"),
    (reads_one_node, "place.times"),
    (reads_slurm_first, "place.slurm_first"),
    (host_from_one, "place.host_from_one"),
    (local_rank_is_rank, "place.local_is_rank"),
    (leaves_texts, "place.texts"),
    (swaps_two, "place.order"),
    (knows_torchrun_alone, "answer.raised", "KeyError: 'RANK'"),
    (does_not_parse, "answer.raised"),
    (returns_nothing, "answer.nothing"),
]

ANSWERS = [
    Answers(
        check.hosts.inside,
        [
            *(inside, inside_with_recv_add, inside_whoever_comes, inside_in_turns),
            *(inside_by_a_ring, inside_in_numpy, inside_by_keyword),
        ],
        INSIDE,
        on=4,
    ),
    Answers(
        check.hosts.between,
        [
            *(between, between_to_the_left, between_padded, between_in_turns),
            *(between_even_first, between_half_by_a_reduction, Between()),
        ],
        BETWEEN,
        on=6,
    ),
    Answers(
        check.hosts.all_reduce,
        [
            *(as_on_the_page, by_a_leader, by_the_last_of_each_host, with_other_pieces),
            *(as_a_clone, in_blocks_of_its_own, through_one_host),
        ],
        ALL_REDUCE,
        on=4,
    ),
    Answers(check.hosts.all_reduce, [], ON_SIX, on=6),
    Answers(
        check.hosts.place,
        [
            *(place, place_in_a_list, place_by_sums, place_by_ranges, place_recursively),
            *(place_as_a_generator, place_by_counting),
        ],
        PLACE,
    ),
]
