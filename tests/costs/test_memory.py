"""Memory on paper against what is counted."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from labkit.costs.memory import gpt_activation_bytes
from labkit.workload.layers import HeldBytes
from labkit.workload.models import build_model


@pytest.mark.parametrize(("samples", "length", "vocabulary"), [(3, 64, 80), (2, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_forward_of_the_transformer_keeps(samples, length, vocabulary, dtype):
    shape = {"num_classes": vocabulary, "input_shape": (length,)}
    model = build_model("gpt", **shape, seed=0, dtype=dtype)
    tokens, targets = torch.randint(vocabulary, (2, samples, length))
    with HeldBytes(model) as held:
        cross_entropy(model(tokens), targets)
    sizes = {"width": 96, "num_heads": 12, "num_blocks": 4, "vocabulary": vocabulary}
    assert held.num_bytes == gpt_activation_bytes(
        samples, length, **sizes, itemsize=dtype.itemsize
    )
