"""A loss as a sum and a weight: shares of any size add up to PyTorch's own mean."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from labkit.workload.losses import ShareLoss, count_right
from labkit.workload.samples import Samples

CLASSES = torch.tensor([0, -100, 2, 1, 1, -100, -100, 4, 3, 0, 2])
TOKENS = torch.stack([CLASSES.roll(n) for n in range(3)], dim=1)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 7.0])
LOGITS = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
VALUES = LOGITS.flip(0).sigmoid()
WIDE = torch.stack([LOGITS.roll(n, 1) for n in range(3)], dim=2)


def pair(outputs, targets):
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.sum(), (targets != -100).sum()


# Loss, outputs, targets.
MEANS = {
    "ignored": (functional.cross_entropy, LOGITS, CLASSES),
    "ignored tokens": (nn.CrossEntropyLoss(), WIDE, TOKENS),
    "another index": (
        partial(functional.cross_entropy, ignore_index=0),
        LOGITS,
        CLASSES.abs() % 5,
    ),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT.double()), LOGITS, CLASSES),
    "float32 weights of tokens": (nn.CrossEntropyLoss(WEIGHT), WIDE.float(), TOKENS),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), WIDE, TOKENS),
    "all options": (
        nn.CrossEntropyLoss(WEIGHT.double(), ignore_index=1, label_smoothing=0.3),
        LOGITS,
        CLASSES.clamp(min=0),
    ),
    "soft targets": (nn.CrossEntropyLoss(WEIGHT.double()), LOGITS, VALUES),
    "nll": (nn.NLLLoss(WEIGHT.double(), ignore_index=-100), LOGITS, CLASSES),
    "mse": (nn.MSELoss(), LOGITS, VALUES),
    "huber": (partial(functional.huber_loss, delta=0.1), LOGITS, VALUES),
    "bce": (nn.BCEWithLogitsLoss(WEIGHT.double(), pos_weight=WEIGHT.double()), LOGITS, VALUES),
    "kl per element": (nn.KLDivLoss(reduction="mean"), LOGITS, VALUES),
    "kl per sample": (nn.KLDivLoss(reduction="batchmean"), LOGITS, VALUES),
    "margins": (nn.MultiMarginLoss(weight=WEIGHT.double()), LOGITS, CLASSES.clamp(min=0)),
}


@pytest.mark.parametrize("name", MEANS)
def test_shares_add_up_to_the_mean_of_pytorch(name):
    loss, outputs, targets = MEANS[name]
    outputs = outputs.clone().requires_grad_()
    samples = Samples(TensorDataset(outputs.detach(), targets))
    share_loss = ShareLoss.of(loss, targets[:1], samples)
    # The second share holds nothing but ignored targets, and the third one nothing.
    shares = zip(outputs.split([5, 2, 0, 4]), targets.split([5, 2, 0, 4]))
    sums, weights = zip(*(share_loss(*share) for share in shares))
    (gradient,) = torch.autograd.grad(sum(sums), outputs, retain_graph=True)
    mean = loss(outputs, targets)
    (expected,) = torch.autograd.grad(mean, outputs)
    torch.testing.assert_close(sum(sums) / sum(weights), mean, check_dtype=False)
    torch.testing.assert_close(gradient / sum(weights), expected, check_dtype=False)


def test_pairs_and_losses_per_sample_are_taken_as_they_are():
    total, weight = ShareLoss.of(pair)(LOGITS, CLASSES)
    torch.testing.assert_close(total / weight, functional.cross_entropy(LOGITS, CLASSES))
    each = nn.MSELoss(reduction="none")
    total, weight = ShareLoss.of(each)(LOGITS, VALUES)
    torch.testing.assert_close(total / weight, each(LOGITS, VALUES).mean())


def test_only_targets_that_are_a_class_and_not_ignored_are_judged():
    targets = LOGITS.argmax(dim=1)
    targets[:3], targets[3:5] = -100, 255
    right, judged = count_right(LOGITS, targets, ignore_index=int(targets[5]))
    counted = int((targets[5:] != targets[5]).sum())
    assert (int(right), int(judged)) == (counted, counted)
