"""The fast hierarchical all-reduce: inside a host as the fast ring, between hosts in segments.

Inside a host the ranks read and write each other's memory, as in ``labkit.collectives.fast_ring``.
Between hosts each block is cut into segments, and the three parts of the algorithm overlap: while
segment g of a block is on the network, segment g + 1 is added up inside the host, and the complete
segment g - 1 is shared there. So a large tensor takes about as long as its bytes over the card.

    inside       add 0 | add 1         | add 2, share 0 | ...  | share last
    between            | 0 ->    <- 0  | 1 ->      <- 1 | ...  |

Blocks, order of additions and bytes are those of ``hierarchical_all_reduce``, so the result is the
same to the bit. Between hosts a message is a segment. Where hosts differ in size, ranks are in
different numbers of rings: then it is ``hierarchical_all_reduce`` itself.

Symbols: H hosts, m ranks of a host, g a segment.
"""

import torch
from torch import Tensor

from labkit.collectives.common import in_place
from labkit.collectives.fast_ring import Ring, fast_ring_all_reduce, with_following
from labkit.collectives.hierarchical import hierarchical_all_reduce, parts_of
from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import share_only, share_reduce
from labkit.comm.comm import Comm, SubComm, exchange_under_way
from labkit.schedules.ring import (
    chunk_bounds,
    num_blocks,
    ring_all_reduce,
    ring_share_only,
    ring_share_reduce,
    rings_between,
)

# Large enough that a segment's latency is small beside its time on a card of 10 Gb/s.
SEGMENT_BYTES = 2 * 2**20

_HALVES = {"share_reduce": ring_share_reduce, "share_only": ring_share_only}


def fast_hierarchical_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """``hierarchical_all_reduce``, pipelined, and through shared memory inside each host.

    With one host, or one rank per host, it is ``fast_ring_all_reduce``.

    Args:
        tensor: any shape and size, equal on every rank; reduced in place and returned.
        op: an operation of ``Reduction``: "sum", "mean", "max", ....
    """
    if len(comm.hosts) in (1, comm.world_size):
        return fast_ring_all_reduce(comm, tensor, op)
    if len({len(ranks) for ranks in comm.hosts}) > 1:
        return hierarchical_all_reduce(comm, tensor, op)
    reduction = Reduction.of(op, tensor)
    with (
        torch.no_grad(),
        in_place(tensor) as flat,
        comm.collective("fast_hierarchical_all_reduce", tensor, op),
    ):
        Pipeline(comm, reduction, flat.to(reduction.wide), flat).run()
    return tensor


class Pipeline:
    """The segments of one tensor on their way, over hosts of equal size.

    Args:
        partial, flat: [N], the sums so far, in the wide dtype, and the result; maybe one memory.
    """

    def __init__(self, comm: Comm, reduction: Reduction, partial: Tensor, flat: Tensor):
        self.comm, self.reduction, self.partial, self.flat = comm, reduction, partial, flat
        most = SEGMENT_BYTES // partial.itemsize
        bounds = chunk_bounds(flat.numel(), num_blocks(comm.hosts))
        # By block, its segments. The first block is the longest; shorter ones end with empty ones.
        self.count = max(1, -(-(bounds[0][1] - bounds[0][0]) // most))
        self.sums, self.results = (
            [_segments(whole[begin:end], most, self.count) for begin, end in bounds]
            for whole in (partial, flat)
        )
        ((self.members, (first, end)),) = rings_between(comm.rank, comm.hosts)
        # The blocks of this rank's part, which its ring between hosts sums.
        self.mine = range(first, end)
        self.landing = partial.new_empty(min(most, partial.numel()))
        # The two halves of the ring inside this rank's host, through channels if it has some.
        self.ranks = ranks = comm.hosts[comm.host]
        others = (rank for rank in ranks if rank != comm.rank)
        self.has_channels = all(map(comm.transport.shares_memory_with, others))
        summed = Reduction(reduction.partial, reduction.wide)
        self.rings = {}
        for name, half in _HALVES.items() if self.has_channels else ():
            steps = (
                step._replace(dst=ranks[step.dst], src=ranks[step.src])
                for step in half(ranks.index(comm.rank), len(ranks))
            )
            self.rings[name] = Ring(comm, summed, with_following(steps))

    def run(self) -> None:
        """Send one segment after another around the ring between hosts."""
        self._inside("share_reduce", 0)
        for number in range(self.count):
            self._between(number)
        self._inside("share_only", self.count - 1)

    def _between(self, number: int) -> None:
        """Ring all-reduce of a segment between hosts; meanwhile, inside, of those beside it."""
        members = self.members
        steps = list(ring_all_reduce(members.index(self.comm.rank), len(members)))
        for place, step in enumerate(steps):
            is_sum = step.phase == "share_reduce"
            blocks = self.sums if is_sum else self.results
            outgoing = blocks[self.mine[step.send_chunk]][number]
            mine = blocks[self.mine[step.recv_chunk]][number]
            incoming = self.landing[: mine.numel()] if is_sum else mine
            ends = outgoing, members[step.dst], incoming, members[step.src]
            with self.comm.span("between_hosts"), exchange_under_way(self.comm, *ends):
                if place == 0 and number + 1 < self.count:
                    self._inside("share_reduce", number + 1)
                if place == len(steps) - 1 and number:
                    self._inside("share_only", number - 1)
            if is_sum:
                self.reduction.combine(mine, incoming, out=mine)
            if is_sum and place == len(members) - 2:
                total = self.reduction.finish(mine, self.comm.world_size)
                self.results[self.mine[step.recv_chunk]][number].copy_(total)

    def _inside(self, name: str, number: int) -> None:
        """``share_reduce`` or ``share_only`` of segment ``number`` of all blocks, in the host."""
        comm, is_sum = self.comm, name == "share_reduce"
        # Each row has one tensor for each rank of the host: the same place in their parts.
        if self.count == 1:
            # The blocks of a part lie side by side.
            rows = [parts_of(comm, self.partial if is_sum else self.flat)]
        else:
            blocks, each = self.sums if is_sum else self.results, len(self.mine)
            rows = [[block[number] for block in blocks[place::each]] for place in range(each)]
        if self.has_channels:
            ring = self.rings[name]
            columns = [column for row in rows for column in ring.columns(row)]
            with comm.span(name), comm.session.streaming(name, ring.dst, self.ranks):
                ring.run(columns)
            return
        # All ranks come to equally many meetings, also those of a host without channels.
        with comm.session.meeting(name):
            pass
        alone = SubComm(comm, self.ranks)
        for row in rows:
            if is_sum:
                share_reduce(alone, row, self.reduction.partial)
            else:
                share_only(alone, row)


def _segments(block: Tensor, most: int, count: int) -> list[Tensor]:
    found = list(block.split(most))
    return found + [block[:0]] * (count - len(found))
