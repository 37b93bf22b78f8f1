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

from labkit.units import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
