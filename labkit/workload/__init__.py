"""What the course trains: data sets, the sampler, and models."""

from labkit.workload.datasets import DATASETS, Data, fake_data, load_dataset
from labkit.workload.models import MODELS, build_model
from labkit.workload.sampling import batch_slices, epoch_order, share

__all__ = [
    "DATASETS",
    "MODELS",
    "Data",
    "batch_slices",
    "build_model",
    "epoch_order",
    "fake_data",
    "load_dataset",
    "share",
]
