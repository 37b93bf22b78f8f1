"""What the course trains: data sets, the sampler, models, and models as lists of layers.

datasets, folders, samples    data sets; images in folders; samples by their numbers
sampling                      which rank gets which samples
images, random_numbers        augmentation, size and scale of a batch; what it draws
models, losses                the models by name; losses as sums over samples
weights, freezing             parameters to start from; layers that are not trained
chain, traced, layers         a model as a list of layers, by PyTorch's tracer if it is no list;
                              the shapes between them (meta: without memory)
activations                   what forward keeps for backward
"""

from labkit.workload.activations import HeldBytes as HeldBytes, NonLeaf as NonLeaf
from labkit.workload.chain import layers_of as layers_of, named_layers as named_layers
from labkit.workload.datasets import (
    DATASETS as DATASETS,
    Data as Data,
    fake_data as fake_data,
    load_dataset as load_dataset,
)
from labkit.workload.layers import input_dtype as input_dtype, output_shapes as output_shapes
from labkit.workload.meta import meta_copy as meta_copy
from labkit.workload.models import (
    MODELS as MODELS,
    build_model as build_model,
    published_vgg16 as published_vgg16,
)
from labkit.workload.sampling import (
    batch_slices as batch_slices,
    epoch_order as epoch_order,
    share as share,
)
