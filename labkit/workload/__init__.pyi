from .activations import HeldBytes as HeldBytes, NonLeaf as NonLeaf
from .chain import layers_of as layers_of, named_layers as named_layers
from .datasets import (
    DATASETS as DATASETS,
    Data as Data,
    fake_data as fake_data,
    load_dataset as load_dataset,
)
from .layers import input_dtype as input_dtype, output_shapes as output_shapes
from .meta import meta_copy as meta_copy
from .models import (
    MODELS as MODELS,
    build_model as build_model,
    published_vgg16 as published_vgg16,
)
from .sampling import (
    batch_slices as batch_slices,
    epoch_order as epoch_order,
    share as share,
)
