"""What the course trains: data sets, the sampler, models, and models as lists of layers."""

from .datasets import load_dataset as load_dataset
from .models import build_model as build_model
from .samples import batch_slices as batch_slices, epoch_order as epoch_order, share as share
