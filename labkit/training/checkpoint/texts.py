"""Texts from every rank to every rank, over a gloo group of their own."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.comm.torch_transport import means_loss
from labkit.errors import PeerLostError

# Longer than any writing; that a rank has ended is noticed at once.
_TIMEOUT = timedelta(days=1)


class Texts:
    """The exchange of texts among the ranks of a run; on one rank it needs no group.

    The group is separate, since the thread that writes exchanges texts while the training sends
    its own messages. Plain texts, and no pickles: whoever could take a rank's place on gloo's
    sockets must not be able to run code.
    """

    def __init__(self, comm: Comm):
        self._world_size = comm.world_size
        self._group: Any = None
        if comm.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks, by rank; called by all of them.

        Raises:
            PeerLostError: another rank has ended.
        """
        if self._group is None:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        try:
            sizes = self._gathered(torch.tensor([len(data)]))
            padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
            padded[: len(data)] = data
            found = self._gathered(padded)
        except RuntimeError as error:
            if means_loss(error):
                raise PeerLostError(
                    "another rank has ended before the checkpoint was whole"
                ) from error
            raise
        return [bytes(one[: int(n)].numpy()).decode() for one, n in zip(found, sizes)]

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self._world_size)]
        dist.all_gather(found, mine, group=self._group)
        return found

    def close(self) -> None:
        """Close the group's connections."""
        if self._group is not None:
            group, self._group = self._group, None
            group.shutdown()
