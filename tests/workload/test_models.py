"""Models: the same everywhere for one seed, right in shape, and safe to cut into stages."""

import pytest
import torch

from labkit.workload.models import MODELS, TEXT_MODELS, build_model

DIGITS = (1, 8, 8)
CIFAR = (3, 32, 32)
# ResNet-50 has the blocks of torchvision and the stem of ResNet-18.
SMALL = [name for name in MODELS if name not in ("resnet50", *TEXT_MODELS)]


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [*((name, shape) for name in SMALL for shape in (DIGITS, CIFAR)), ("resnet50", DIGITS)],
)
def test_forward_and_backward_in_training_mode_even_on_one_sample(name, input_shape):
    model = build_model(name, num_classes=7, input_shape=input_shape, seed=0)
    for num_samples in (1, 2):
        outputs = model(torch.randn(num_samples, *input_shape))
        assert outputs.shape == (num_samples, 7)
        assert outputs.isfinite().all()
    outputs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_tied_transformer_that_looks_only_back():
    model = build_model("gpt", num_classes=7, input_shape=(5,), seed=0)
    tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    assert logits.shape == (2, 7, 5)
    assert model[-1].weight is model[0].token.weight
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 7
    differs = (model(changed) != logits).any(dim=1)
    assert differs.tolist() == [[False, False, False, True, True]] * 2
    with pytest.raises(ValueError, match="texts"):
        build_model("gpt", num_classes=7, input_shape=DIGITS, seed=0)


@pytest.mark.parametrize(
    ("name", "input_shape", "expected"),
    [
        ("small_cnn", DIGITS, 29_066),
        ("small_cnn", CIFAR, 29_642),
        ("mlp", DIGITS, 8_970),
        # The reference project's MobileNet.
        ("mobilenet", CIFAR, 2_236_682),
        ("gpt", (64,), 461_376 - 70 * 96),
        ("vgg16", CIFAR, 14_714_688 + 512 * 10 + 10),
    ],
)
def test_parameter_counts(name, input_shape, expected):
    model = build_model(name, num_classes=10, input_shape=input_shape, seed=0)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(sizes) == expected
    assert name != "mobilenet" or len(sizes) == 158


def test_at_full_size_the_layers_compute_what_torchvision_computes():
    import torchvision

    for name, constructor in (
        ("resnet18", torchvision.models.resnet18),
        ("mobilenet", torchvision.models.mobilenet_v2),
        ("resnet50", torchvision.models.resnet50),
    ):
        ours = build_model(name, num_classes=5, input_shape=(3, 96, 96), seed=0).eval()
        theirs = constructor(num_classes=5).eval()
        with torch.no_grad():
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                other.copy_(mine)
            inputs = torch.randn(2, 3, 96, 96)
            torch.testing.assert_close(ours(inputs), theirs(inputs))
