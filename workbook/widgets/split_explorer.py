"""A model cut into stages: a picture whose cuts are dragged, or sliders above a figure."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from labkit.costs.link import Link
from labkit.placement.stage_costs import Profile
from labkit.training.split_run import MeasuredSplit, measure_profile, measure_split
from workbook.widgets.kept import kept_state
from workbook.widgets.split_choice import MICRO_BATCHES, Choice, SplitModels, check_stages
from workbook.widgets.split_sliders import SplitSliders
from workbook.widgets.split_work import SplitWork

if TYPE_CHECKING:
    from workbook.widgets.split_picture.widget import SplitPicture


def split_explorer(
    profile: Profile | nn.Module,
    link: Link | None = None,
    *,
    split_points: Sequence[int] | None = None,
    micro_batches: int = 1,
    schedule: str = "gpipe",
    batch_size: int = 16,
    input_shape: tuple[int, ...] = (3, 32, 32),
    frozen: int = 0,
    measure: Callable[..., MeasuredSplit] = measure_split,
    picture: bool | None = None,
) -> "SplitPicture | SplitSliders":
    """Explore where to cut a model: drag the cuts, see the predicted step, and measure it.

    Its static twin is ``plots.split_costs``.

    Args:
        profile: the model's layers, or your own chain of layers, which is measured here.
        link: between two stages on this machine; None leaves only ``split_choice.LINKS``.
        split_points: to start with, 1 to 3; by default one cut in the middle of the layers.
        micro_batches: to start with, one of ``MICRO_BATCHES``, at most the batch size.
        schedule: to start with, ``gpipe`` or ``1f1b``.
        batch_size: to start with, if a chain of layers is given.
        input_shape: of one sample, for the run.
        frozen: the number of layers, from the first on, that are not trained.
        measure: what Run calls, with the arguments of ``training.split_run.measure_split``.
        picture: False for sliders above a figure; by default only without ``anywidget``.

    Raises:
        ValueError: a start that its control does not offer, or a model that cannot be cut.
    """
    model, profile = _profiled(profile, batch_size, input_shape)
    points = (len(profile.layers) // 2,) if split_points is None else tuple(split_points)
    _check_start(points, micro_batches, profile.batch_size)
    models = SplitModels(profile, link, frozen)
    start = Choice(points, next(iter(models.links)), micro_batches, schedule, profile.batch_size)
    models.predicted(start)  # refuses impossible settings
    run = partial(measure, model, input_shape=tuple(input_shape), frozen=frozen)
    kept = kept_state(profile.model, *_sizes(profile), frozen, *models.links, *start)
    return _explorer_class(picture)(SplitWork(models, run, kept), start)


def _sizes(profile: Profile) -> list[tuple[str, int, int]]:
    """What differs for another model, which must not show what was measured of this one."""
    return [(layer.name, layer.output_bytes, layer.parameter_bytes) for layer in profile.layers]


def _profiled(
    model: Profile | nn.Module, batch_size: int, input_shape: tuple[int, ...]
) -> tuple[str | nn.Module, Profile]:
    """What Run trains, and its profile."""
    if isinstance(model, Profile):
        return model.model, model
    return model, measure_profile(model, batch_size=batch_size, input_shape=input_shape)


def _check_start(points: tuple[int, ...], micro_batches: int, batch_size: int) -> None:
    check_stages(points)
    possible = [m for m in MICRO_BATCHES if m <= batch_size]
    if micro_batches not in possible:
        known = ", ".join(map(str, possible))
        raise ValueError(
            f"micro_batches is one of {known} for a batch of {batch_size}, got {micro_batches!r}"
        )


def _explorer_class(picture: bool | None) -> Any:
    if picture is None:
        picture = importlib.util.find_spec("anywidget") is not None
    if not picture:
        return SplitSliders
    from workbook.widgets.split_picture.widget import SplitPicture

    return SplitPicture
