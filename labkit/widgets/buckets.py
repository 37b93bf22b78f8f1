"""DDP's buckets under controls: how large a bucket is, how many ranks, over which link."""

from typing import Any

import ipywidgets

from labkit import plots
from labkit.plots.buckets import BUCKET_SIZES_MB, LINKS, bucket_words, size_name

MAX_RANKS = 16


def bucket_explorer(
    bucket_mb: float = 25, world_size: int = 4, link: str = "10 Gb/s network"
) -> "BucketExplorer":
    """Explore the model of a backward pass with buckets; ``plots.bucket_overlap`` draws it still.

    The sliders move by arrow keys, and the list of links too.

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


class BucketExplorer(ipywidgets.VBox):
    """Three controls above a figure.

    Attributes:
        size: the slider of the bucket's size.
        ranks: the slider of the world size.
        link: the list of links.
        view: the figure as HTML: picture, alt text, and the model in words.
    """

    def __init__(self, bucket_mb: float, world_size: int, link: str):
        sizes = [(size_name(size), size) for size in BUCKET_SIZES_MB]
        self.size = ipywidgets.SelectionSlider(
            options=sizes, value=bucket_mb, description="bucket"
        )
        self.ranks = ipywidgets.IntSlider(world_size, 2, MAX_RANKS, description="ranks")
        self.link = ipywidgets.Dropdown(options=list(LINKS), value=link, description="link")
        self.view = ipywidgets.HTML()
        self._controls = self.size, self.ranks, self.link
        super().__init__([*self._controls, self.view])
        self._pages: dict[tuple, str] = {}
        for control in self._controls:
            control.observe(self._show, "value")
        self._show()

    def close(self) -> None:
        """Take controls and figure off the page; nothing listens to them any more."""
        for child in (*self._controls, self.view):
            child.unobserve_all("value")
            child.close()
        super().close()

    def _show(self, _change: Any = None) -> None:
        """Show what the controls say now, which may be later than the change that called."""
        key = tuple(control.value for control in self._controls)
        if key not in self._pages:
            page = plots.bucket_overlap(*key).html()
            # Screen readers say the caption whenever it changes.
            spoken = '<figcaption role="status" aria-live="polite" '
            page = page.replace("<figcaption ", spoken, 1)
            # Widgets have lines as high as buttons.
            self._pages[key] = f'<div style="line-height: 1.4">{page}</div>'
        self.view.value = self._pages[key]

    def __repr__(self) -> str:
        names = ", ".join(LINKS)
        words = bucket_words(*(control.value for control in self._controls))
        return f"[sliders] bucket, ranks 2 to {MAX_RANKS}, link ({names}). {words}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # The base class cuts the text, which is all that a stored notebook keeps of a widget.
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": repr(self)}
