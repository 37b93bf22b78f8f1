"""Which part of a transfer between GPUs was waiting: told after the run, from all ranks' spans.

On a GPU an operation is only queued, and the host does not see when it begins. Each rank records a
CUDA event on its stream before the operation and one after it, on clocks that agree to some 10 us
(``tracing.CudaTimer``). The operation begins on both sides when the stream of the later rank
has reached it: what the earlier rank's operation lasted before that is ``wait``, the rest is the
transfer.

What this cannot tell: waiting that is shorter than the clocks agree; whether a message that waits
in NCCL's own stream behind another thread's message of the same rank is on its way; and between
machines, whose clocks differ, nothing. A send may end before its receive has begun, if the
message fits into buffers: then it has waited for nobody.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from labkit.tracing.spans import Meeting, Span

# {what meets: {rank: when its stream has reached it, in seconds}}
Arrivals = dict[Meeting, dict[int, float]]
# A peer that seems to arrive so shortly after the end has arrived before it: the clocks of two
# GPUs differ a little.
_CLOCKS_DIFFER_S = 1e-4


def waits_told(parts: Iterable[Iterable[Span]]) -> Iterator[Span]:
    """All ranks' spans, those with ``meets`` cut into waiting for the last peer and transfer."""
    spans = [span for part in parts for span in part]
    begun_s: Arrivals = defaultdict(dict)
    for span in spans:
        for meeting in span.meets:
            begun_s[meeting][span.rank] = span.start_s
    for span in spans:
        if span.meets:
            yield from _cut(span, begun_s)
        else:
            yield span


def _cut(span: Span, begun_s: Arrivals) -> Iterator[Span]:
    arrivals = [
        (at_s, rank)
        for meeting in span.meets
        for rank, at_s in begun_s[meeting].items()
        if rank != span.rank and not _was_buffered(meeting, span, at_s)
    ]
    arrived_s, peer = max(arrivals, default=(span.start_s, None))
    begins_s = min(max(arrived_s, span.start_s), span.end_s)
    if begins_s > span.start_s:
        yield Span(span.rank, "wait", span.start_s, begins_s, 0, peer, span.lane)
    if begins_s < span.end_s or span.num_bytes:
        yield replace(span, start_s=begins_s, meets=())


def _was_buffered(meeting: Meeting, span: Span, arrived_s: float) -> bool:
    """Whether this rank's send ended although its receiver had not come yet."""
    return meeting[0] == span.rank and arrived_s > span.end_s + _CLOCKS_DIFFER_S
