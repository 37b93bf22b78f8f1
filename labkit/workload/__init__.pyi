from .datasets import DATASETS as DATASETS, Data as Data, load_dataset as load_dataset
from .layers import (
    EmulatedLayer as EmulatedLayer,
    HeldBytes as HeldBytes,
    NonLeaf as NonLeaf,
    input_dtype as input_dtype,
    layers_of as layers_of,
    meta_copy as meta_copy,
    named_layers as named_layers,
    output_shapes as output_shapes,
)
from .models import MODELS as MODELS, build_model as build_model
from .sampling import (
    batch_slices as batch_slices,
    epoch_order as epoch_order,
    share as share,
)
