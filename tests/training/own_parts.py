"""A learner's own model, data sets, losses and optimizers, good and bad."""

import threading

import torch
from ranks import travel_by_value
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

travel_by_value(__name__)


class Net(nn.Module):
    """A chain with a skip connection, and a layer that nothing uses: [n, 6] -> [n, 3]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.unused, self.last = nn.Linear(2, 2), nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        hidden = hidden + torch.tanh(self.second(hidden))
        return self.last(hidden)


class Points(Dataset):
    """Points [6] of three classes, made anew for each sample."""

    def __init__(self, size, seed=0):
        self.inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        point = self.inputs[index]
        return point, int(point[0] > 0) + int(point[1] > 0)


class Bad(Points):
    """The sample that ``item`` makes of a point and its class."""

    def __init__(self, item):
        super().__init__(8)
        self.item = item

    def __getitem__(self, index):
        return self.item(*super().__getitem__(index), index)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.ones(6), 0


class WithLock(Points):
    def __init__(self):
        super().__init__(8)
        self.lock = threading.Lock()


class TwoOutputs(Net):
    def forward(self, inputs):
        return super().forward(inputs), inputs


def smooth(outputs, targets):
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


def net(inputs=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))
