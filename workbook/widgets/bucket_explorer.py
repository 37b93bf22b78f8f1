"""DDP's buckets with controls: the size of a bucket, the number of ranks, and the link."""

import ipywidgets

from workbook import plots
from workbook.plots.bucket_overlap import BUCKET_SIZES_MB, LINKS, example_step, size_name
from workbook.widgets.explorer import Explorer

MAX_RANKS = 16


def bucket_explorer(
    bucket_mb: float = 25, world_size: int = 4, link: str = "10 Gb/s network"
) -> Explorer:
    """Explore the model of a backward pass with buckets; ``plots.bucket_overlap`` draws it.

    Args:
        bucket_mb: MiB to start with, one of ``plots.BUCKET_SIZES_MB``; the control ``size``.
        world_size: ranks to start with, 2 to 16; the control ``ranks``.
        link: to start with, one of ``plots.LINKS``; the control ``link``.

    Raises:
        ValueError: a value to start with that its control does not offer.
    """
    if bucket_mb not in BUCKET_SIZES_MB:
        known = ", ".join(f"{size:g}" for size in BUCKET_SIZES_MB)
        raise ValueError(f"the slider has no {bucket_mb!r} MiB: choose one of {known}")
    if world_size not in range(2, MAX_RANKS + 1):
        raise ValueError(f"the explorer shows 2 to {MAX_RANKS} ranks, got {world_size}")
    example_step(bucket_mb, world_size, link)  # refuses an unknown link
    sizes = [(size_name(size), size) for size in BUCKET_SIZES_MB]
    return Explorer(
        plots.bucket_overlap,
        size=ipywidgets.SelectionSlider(options=sizes, value=bucket_mb, description="bucket"),
        ranks=ipywidgets.IntSlider(world_size, 2, MAX_RANKS, description="ranks"),
        link=ipywidgets.Dropdown(options=list(LINKS), value=link, description="link"),
    )
