"""DDP's buckets under controls: how large a bucket is, how many ranks, over which link."""

import ipywidgets

from labkit import plots
from labkit.plots.bucket_overlap import BUCKET_SIZES_MB, LINKS, size_name
from labkit.widgets.explorer import Explorer

MAX_RANKS = 16


def bucket_explorer(
    bucket_mb: float = 25, world_size: int = 4, link: str = "10 Gb/s network"
) -> "BucketExplorer":
    """Explore the model of a backward pass with buckets; ``plots.bucket_overlap`` draws it.

    All controls answer to arrow keys.

    Args:
        bucket_mb: MiB to start with, one of ``plots.BUCKET_SIZES_MB``.
        world_size: ranks to start with, 2 to 16.
        link: to start with, one of ``plots.LINKS``.

    Raises:
        ValueError: a start that the controls do not have.
    """
    if bucket_mb not in BUCKET_SIZES_MB:
        known = ", ".join(f"{size:g}" for size in BUCKET_SIZES_MB)
        raise ValueError(f"the slider has no {bucket_mb!r} MiB: choose one of {known}")
    if world_size not in range(2, MAX_RANKS + 1):
        raise ValueError(f"the explorer shows 2 to {MAX_RANKS} ranks, got {world_size}")
    if link not in LINKS:
        raise ValueError(f"unknown link {link!r}: choose one of {', '.join(LINKS)}")
    return BucketExplorer(bucket_mb, world_size, link)


class BucketExplorer(Explorer):
    """Three controls above a figure.

    Attributes:
        size: the slider of the bucket's size.
        ranks: the slider of the world size.
        link: the list of links.
    """

    def __init__(self, bucket_mb: float, world_size: int, link: str):
        sizes = [(size_name(size), size) for size in BUCKET_SIZES_MB]
        self.size = ipywidgets.SelectionSlider(
            options=sizes, value=bucket_mb, description="bucket"
        )
        self.ranks = ipywidgets.IntSlider(world_size, 2, MAX_RANKS, description="ranks")
        self.link = ipywidgets.Dropdown(options=list(LINKS), value=link, description="link")
        super().__init__(plots.bucket_overlap, self.size, self.ranks, self.link)
