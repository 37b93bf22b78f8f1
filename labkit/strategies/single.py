"""Training on one device: the reference for all synchronous techniques.

Each of them has to end with the same parameters.
"""

from dataclasses import dataclass

from labkit.strategies.on_shares import OnShares


@dataclass(eq=False)
class Single(OnShares):
    """Plain training of the whole batch; ``sync_batch_norm`` changes nothing on one device."""

    sync_batch_norm: bool = False

    def check_ranks(self, world_size: int) -> None:
        if world_size != 1:
            raise ValueError(
                f"strategy single trains on one rank, got world_size {world_size}: use world_size "
                "1, or another strategy"
            )
