"""What the course trains: data sets, the sampler, models, and models as lists of layers."""

from labkit.workload.activations import HeldBytes, NonLeaf
from labkit.workload.datasets import DATASETS, Data, fake_data, load_dataset
from labkit.workload.layers import input_dtype, layers_of, meta_copy, named_layers, output_shapes
from labkit.workload.models import MODELS, build_model, published_vgg16
from labkit.workload.sampling import batch_slices, epoch_order, share

__all__ = [
    "DATASETS",
    "MODELS",
    "Data",
    "HeldBytes",
    "NonLeaf",
    "batch_slices",
    "build_model",
    "epoch_order",
    "fake_data",
    "input_dtype",
    "layers_of",
    "load_dataset",
    "meta_copy",
    "named_layers",
    "output_shapes",
    "published_vgg16",
    "share",
]
