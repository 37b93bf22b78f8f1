"""An emulated link: messages take the time that they would take on a slower network.

What is modelled: every rank has one network card, which sends and receives at the same time. A
message takes latency + bytes / bandwidth, from the moment when both ranks have come to it, and
occupies the sender's outgoing and the receiver's incoming side for that time. Messages of one
rank queue up one after another on each side, whichever ranks they go to or come from. A rank that
sends or receives waits for the end of its message, asleep: the link is busy, and the cores are
free for other threads, such as a backward pass that overlaps with the message.

What is not modelled: buffers, packets, switches, losses; a barrier, which has no payload, takes no
longer than before. The real transfer still takes place, and its time is added. The model is the
alpha-beta model of ``labkit.costs.link``: alpha is the latency, beta is 1 / bandwidth.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.comm.transport import Transport
from labkit.errors import PeerLostError
from labkit.units import MOST_SECONDS, check_above_zero, check_number

_ENDLESS = float("inf")


@dataclass(frozen=True)
class EmulatedLink:
    """The link of each rank: ``labkit.run(fn, world_size=4, link=EmulatedLink(0.01, 12.5e6))``.

    Attributes:
        latency_s: seconds that every message takes, even an empty one.
        bandwidth_bytes_per_s: bytes per second, in each direction; infinite if left out.

    Raises:
        ValueError: a negative latency, or a bandwidth of 0 or less.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = _ENDLESS

    def __post_init__(self) -> None:
        check_number("latency_s", self.latency_s, 0, MOST_SECONDS)
        check_above_zero("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, _ENDLESS)

    def __str__(self) -> str:
        """As in ``labkit train --link``, which reads the same numbers from it."""
        bandwidth = self.bandwidth_bytes_per_s
        return f"{self.latency_s}s" + (f",{bandwidth}B/s" if bandwidth < _ENDLESS else "")

    def message_seconds(self, num_bytes: float) -> float:
        """Seconds that one message of ``num_bytes`` takes."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


class Card:
    """One rank's network card: until when each of its two sides is busy.

    All connections of a process share one card, so that their messages queue up together.

    Args:
        link: how long messages take.
        now: the clock, in seconds.
    """

    def __init__(self, link: EmulatedLink, now: Callable[[], float] = time.monotonic):
        self.link = link
        self._now = now
        self._free_s = {"out": 0.0, "in": 0.0}
        # Several threads may send or receive, each on a connection to another rank.
        self._booking = threading.Lock()

    def book(self, out_bytes: int | None = None, in_bytes: int | None = None) -> float:
        """Put a message of so many bytes on a side, or one on each; None for no message there.

        Returns the seconds from now until the later of the two ends.
        """
        sides = {"out": out_bytes, "in": in_bytes}
        with self._booking:
            now_s = end_s = self._now()
            for side, num_bytes in sides.items():
                if num_bytes is not None:
                    start_s = max(now_s, self._free_s[side])
                    self._free_s[side] = start_s + self.link.message_seconds(num_bytes)
                    end_s = max(end_s, self._free_s[side])
        return end_s - now_s


class LinkTransport(Transport):
    """Another transport's messages, each as slow as on the card's link.

    The other transport moves and counts them, so the counts are the same as without a link. There
    are no channels: collectives that would write directly into shared memory send messages.
    """

    def __init__(self, transport: Transport, card: Card):
        # Not ``super().__init__``: the counters are those of the transport that moves the bytes.
        self._transport, self._card = transport, card
        self.sent = transport.sent
        self.receives_from_any = transport.receives_from_any
        self.ends_together = transport.ends_together
        self.queues = transport.queues
        self._abandoned = threading.Event()

    def send(self, tensor: Tensor, dst: int) -> None:
        self._transport.send(tensor, dst)
        self._travel(tensor.device, out_bytes=tensor.nbytes)

    def recv(self, tensor: Tensor, src: int) -> None:
        self._transport.recv(tensor, src)
        self._travel(tensor.device, in_bytes=tensor.nbytes)

    def recv_add(self, tensor: Tensor, src: int) -> None:
        self._transport.recv_add(tensor, src)
        self._travel(tensor.device, in_bytes=tensor.nbytes)

    def expect(self, tensor: Tensor, sources: Sequence[int], ring: Callable[[], None]) -> None:
        self._transport.expect(tensor, sources, ring)

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        return self._transport.arrived(tensor, sources)

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        self._transport.exchange(send, dst, recv, src)
        self._travel(send.device, out_bytes=send.nbytes, in_bytes=recv.nbytes)

    def barrier(self) -> None:
        self._transport.barrier()

    def take_queued(self) -> list[Any]:
        return self._transport.take_queued()

    def stream(self) -> int:
        return self._transport.stream()

    def abort(self) -> None:
        self._transport.abort()

    def set_timeout(self, timeout_s: float) -> None:
        self._transport.set_timeout(timeout_s)

    def abandon(self) -> None:
        self._abandoned.set()
        self._transport.abandon()

    def close(self) -> None:
        self._transport.close()

    def _travel(
        self, device: torch.device, out_bytes: int | None = None, in_bytes: int | None = None
    ) -> None:
        """Sleep until the messages have passed the link."""
        if device.type == "cuda":
            # So far the transfer is only queued, and what is queued next must come after it.
            torch.cuda.current_stream(device).synchronize()
        if self._abandoned.wait(self._card.book(out_bytes, in_bytes)):
            raise PeerLostError("this rank is ending")


_card: Card | None = None


def plug_in(link: EmulatedLink | None) -> None:
    """Give this process a card for ``link``, or take its card away: a rank has one card."""
    global _card
    _card = None if link is None else Card(link)


def over_link(transport: Transport) -> Transport:
    """``transport`` over this process's emulated link, if it has one."""
    return transport if _card is None else LinkTransport(transport, _card)
