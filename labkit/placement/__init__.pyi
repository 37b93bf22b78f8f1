from .planner import (
    SplitModel as SplitModel,
    best_split as best_split,
    predict_split as predict_split,
)
from .stage_costs import LayerCost as LayerCost, Profile as Profile
from .vgg16_splits import VGG16_SPLITS as VGG16_SPLITS
