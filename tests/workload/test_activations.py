"""What a forward pass keeps for its backward."""

import torch
from torch import nn

from labkit.workload.activations import HeldBytes


def test_what_a_forward_keeps_for_its_backward_in_bytes():
    linear = nn.Linear(4, 4)
    inputs = torch.randn(3, 4)
    with HeldBytes(linear) as held:
        outputs = torch.tanh(linear(inputs))
    # The input and tanh's result; the weight is there anyway.
    assert held.num_bytes == 2 * 3 * 4 * 4
    with held:
        outputs.square().sum()  # keeps tanh's result, which counts already
    assert held.num_bytes == 2 * 3 * 4 * 4
    with HeldBytes(linear) as held:
        torch.tanh(inputs[:1].requires_grad_())
    assert held.num_bytes == 4 * 4
