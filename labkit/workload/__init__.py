"""The subjects of training: data sets, the sampler, models, and models as lists of layers.

datasets             data sets, and images in folders
samples              the sampler; batches of samples by their numbers
models, losses       the models by name; losses as sums over samples
weights              parameters to start from; layers that are not trained
layers               a model as a list of layers: shapes between them, what forward keeps
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
