"""Where to cut a model into stages.

profile        what each layer costs, measured
stage_costs    the costs of layers as data, and the costs of stages made of them
planner        what a split costs, and the best split
search         the cheapest cuts: dynamic programming, branch and bound
even_split     a split by counted FLOPs, the same in every process
vgg16_splits   split points of VGG16 to compare
"""

from labkit.placement.planner import (
    SplitModel as SplitModel,
    best_split as best_split,
    predict_split as predict_split,
)
from labkit.placement.stage_costs import LayerCost as LayerCost, Profile as Profile
from labkit.placement.vgg16_splits import VGG16_SPLITS as VGG16_SPLITS
