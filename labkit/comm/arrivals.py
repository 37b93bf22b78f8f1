"""Messages that a rank is ready for before it knows which of them it will take: over gloo.

``recv_any`` takes the first of several messages. Ranks of one host see on their board who sends.
From a rank of another host nothing is seen until its message is there: so one receive is posted
for each such source, in a thread of its own, and what has arrived is kept until it is taken, by
``recv_any`` or by a later ``recv`` of the same source, shape and dtype.

gloo cannot take back a posted receive. So they belong to the process group, and outlive a run.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from labkit.tracing import ClockTimer

# A source, and the tag of its messages.
Key = tuple[int, int]
# What a thread receives, and what it calls then.
Work = tuple[Key, Callable[[], None]]
# For a thread whose message never comes.
_PATIENCE_S = 1.0


@dataclass
class Arrival:
    """One posted receive.

    Attributes:
        landing: where the message arrives, uint8 [n].
        ended: set once it is there, or will not come.
        error: why it will not come; None if it is there.
        at_s: when that was, on the clock of the board.
    """

    landing: Tensor
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    at_s: float = 0.0


class Arrivals:
    """The posted receives of one process group.

    Args:
        receive: ``receive(tensor, source, tag)`` over the group; it waits until the message is
            there.
    """

    def __init__(self, receive: Callable[[Tensor, int, int], None]):
        self._receive = receive
        self._posted: dict[Key, Arrival] = {}
        self._queues: dict[int, SimpleQueue[Work | None]] = {}
        self._threads: list[threading.Thread] = []
        self._clock = ClockTimer()

    def post(
        self, num_bytes: int, sources: Iterable[int], tag: int, ring: Callable[[], None]
    ) -> None:
        """Be ready for one message of each source that none is awaited from; then call ``ring``.

        ``ring`` is called by a thread, once for each message.
        """
        for source in sources:
            key = source, tag
            if key not in self._posted:
                self._posted[key] = Arrival(torch.empty(num_bytes, dtype=torch.uint8))
                self._queue(source).put((key, ring))

    def ended(self, sources: Iterable[int], tag: int) -> dict[int, float]:
        """The sources whose message is there or will not come, and since when."""
        found = {source: self._posted.get((source, tag)) for source in sources}
        return {source: one.at_s for source, one in found.items() if one and one.ended.is_set()}

    def awaits(self, source: int, tag: int) -> bool:
        """Whether a receive is posted whose message has not been taken."""
        return bool(self._posted) and (source, tag) in self._posted

    def take(self, source: int, tag: int) -> Tensor:
        """The message of ``source``, which ``awaits`` says; waits until it is there.

        Raises the error of a message that does not come.
        """
        arrival = self._posted[source, tag]
        arrival.ended.wait()
        del self._posted[source, tag]
        if arrival.error is not None:
            raise arrival.error
        return arrival.landing

    def close(self) -> None:
        """End the threads, each of which would keep the process group alive."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def _queue(self, source: int) -> SimpleQueue[Work | None]:
        if source not in self._queues:
            self._queues[source] = queue = SimpleQueue()
            name = f"labkit-from-{source}"
            thread = threading.Thread(target=self._work, args=[queue], name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._queues[source]

    def _work(self, queue: SimpleQueue[Work | None]) -> None:
        while (work := queue.get()) is not None:
            key, ring = work
            arrival = self._posted[key]
            try:
                self._receive(arrival.landing, *key)
            except Exception as error:
                arrival.error = error
            arrival.at_s = self._clock.mark()
            arrival.ended.set()
            ring()
