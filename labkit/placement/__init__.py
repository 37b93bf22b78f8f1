"""Where to cut a model into stages: what layers cost, what a split costs, and the best one."""

from labkit.placement.planner import (
    VGG16_SPLITS,
    SplitModel,
    best_split,
    predict_split,
)
from labkit.placement.stage_costs import LayerCost, Profile

__all__ = [
    "VGG16_SPLITS",
    "LayerCost",
    "Profile",
    "SplitModel",
    "best_split",
    "predict_split",
]
