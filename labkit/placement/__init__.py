"""The cuts of a model into stages.

planner    the costs of layers as data, what a split costs, and the best split
profile    the cost of each layer: measured, or its counted FLOPs
"""

from labkit.placement.planner import (
    VGG16_SPLITS as VGG16_SPLITS,
    best_split as best_split,
    predict_split as predict_split,
)
