"""Right predictions are counted where the loss is computed."""

import torch
from torch.nn import functional

from labkit.workload.losses import CountedLoss, sum_cross_entropy


def batches(count):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 5, (count,), generator=generator).tolist()
    return [(torch.randn(n, 3, generator=generator), torch.arange(n) % 3) for n in sizes]


def test_the_count_is_that_of_all_samples_however_many_batches_there_are():
    counted = CountedLoss(sum_cross_entropy)
    assert counted.take() == (0, 0)
    for number in (1, 64, 150):
        some = batches(number)
        for outputs, targets in some:
            assert torch.equal(counted(outputs, targets), sum_cross_entropy(outputs, targets))
        right = sum(int((o.argmax(dim=1) == t).sum()) for o, t in some)
        assert tuple(map(int, counted.take())) == (right, sum(len(t) for _, t in some))
    assert counted.take() == (0, 0)


def test_a_loss_that_changes_its_inputs_is_counted_before_it_does():
    def overwriting(outputs, targets):
        loss = functional.cross_entropy(outputs, targets)
        outputs.zero_()
        return loss

    counted = CountedLoss(overwriting)
    counted(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 1]))
    assert tuple(map(int, counted.take())) == (2, 2)


def test_what_is_no_choice_among_classes_is_not_counted():
    counted = CountedLoss(lambda outputs, targets: outputs.sum())
    counted(torch.ones(2, 3), torch.ones(2, 3))
    counted(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64))
    counted(torch.ones(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64))
    counted(torch.ones(2, 3), torch.ones(2))
    assert counted.take() == (0, 0)


def test_no_gradient_goes_through_the_count():
    outputs = torch.ones(2, 3, requires_grad=True)
    counted = CountedLoss(sum_cross_entropy)
    counted(outputs, torch.tensor([0, 1])).backward()
    right, judged = counted.take()
    assert not right.requires_grad
    assert judged == 2
    plain = torch.ones(2, 3, requires_grad=True)
    sum_cross_entropy(plain, torch.tensor([0, 1])).backward()
    assert torch.equal(outputs.grad, plain.grad)
