"""Small models with the parameters and buffers that cause trouble.

They take [n, 6] and return [n, 6], one class per column.
"""

import torch
from ranks import travel_by_value
from torch import Tensor, nn

travel_by_value(__name__)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs)))


class Everything(Tied):
    """Tied, unused and frozen parameters, and one of a single element."""

    def __init__(self):
        super().__init__()
        self.unused, self.frozen = nn.Linear(6, 2), nn.Parameter(torch.ones(6), False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return self.gain * super().forward(inputs) + self.frozen


class Mixed(nn.Module):
    """Two dtypes, and buffers that are not floats."""

    def __init__(self):
        super().__init__()
        self.single, self.wide = nn.Linear(6, 6), nn.Linear(6, 6).double()
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))

    def double(self):
        return self

    def forward(self, inputs):
        return self.wide(self.single(inputs.float()).double())


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))


def seeded(make_model):
    torch.manual_seed(0)
    return make_model().double()


def some_batches(sizes=(7, 5, 2), classes=6) -> list[tuple[Tensor, Tensor]]:
    """Inputs [n, 6] float64 and targets [n]; no number of ranks divides 7, 5 and 2."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64),
            torch.randint(classes, (n,), generator=generator),
        )
        for n in sizes
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
