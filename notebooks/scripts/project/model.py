"""What is trained: any ``nn.Module``; its starting values come from the run's seed."""

from torch import nn


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
