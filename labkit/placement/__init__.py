"""Where to cut a model into stages.

planner    the costs of layers as data, what a split costs, and the best split
profile    what each layer costs: measured, or its counted FLOPs
"""

from labkit.placement.planner import VGG16_SPLITS, best_split, predict_split

__all__ = ["VGG16_SPLITS", "best_split", "predict_split"]
