"""Where to cut a model into stages.

profile        what each layer costs, measured
stage_costs    the costs of layers as data, and the costs of stages made of them
planner        what a split costs, and the best split
search         the cheapest cuts: dynamic programming, branch and bound
even_split     a split by counted FLOPs, the same in every process
vgg16_splits   split points of VGG16 to compare
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
