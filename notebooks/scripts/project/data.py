"""What it is trained on, and held-out samples: pairs of tensors, or PyTorch's data sets."""

import torch


def make_dataset():
    """Points [n, 2] in a square; class 1 is inside a circle. Every rank has to make the same."""
    generator = torch.Generator().manual_seed(0)
    points = 2 * torch.rand(1200, 2, generator=generator) - 1
    classes = (points.norm(dim=1) < 0.7).long()
    return (points[:1000], classes[:1000]), (points[1000:], classes[1000:])
