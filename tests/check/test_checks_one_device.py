"""Page 01's checks by mutation: the references pass, and each wrong answer has its name."""

from functools import partial

import pytest
import torch
from graded import default_sizes, in_shared_runs
from ranks import travel_by_value

from labkit import check
from labkit.collectives import all_gather, ring_all_reduce

travel_by_value(__name__)


# accumulate(comm, gradients, num_samples, batch_size)


def accumulates(comm, gradients, num_samples, batch_size):
    total = sum(n * gradient for n, gradient in zip(num_samples, gradients))
    return ring_all_reduce(comm, total) / batch_size


def means_of_means(comm, gradients, num_samples, batch_size):
    return ring_all_reduce(comm, sum(gradients) / len(gradients), "mean")


def sums(comm, gradients, num_samples, batch_size):
    return accumulates(comm, gradients, num_samples, 1)


def divides_by_its_own(comm, gradients, num_samples, batch_size):
    return accumulates(comm, gradients, num_samples, sum(num_samples))


def overwrites(comm, gradients, num_samples, batch_size):
    for n, gradient in zip(num_samples, gradients):
        total = n * gradient
    return ring_all_reduce(comm, total) / batch_size


def keeps_to_itself(comm, gradients, num_samples, batch_size):
    return sum(n * gradient for n, gradient in zip(num_samples, gradients)) / batch_size


def ranks_alike(comm, gradients, num_samples, batch_size):
    mine = keeps_to_itself(comm, gradients, num_samples, sum(num_samples))
    return ring_all_reduce(comm, mine, "mean")


def synchronises_each(comm, gradients, num_samples, batch_size):
    parts = [ring_all_reduce(comm, n * g) for n, g in zip(num_samples, gradients)]
    return sum(parts) / batch_size


# loss_scaling(comm, weight, gradient, scale, lr)


def scales(comm, weight, gradient, scale, lr):
    ring_all_reduce(comm, gradient)
    if not gradient.isfinite().all():
        return [weight, scale / 2]
    return [weight - lr * gradient / scale, scale]


def never_unscales(comm, weight, gradient, scale, lr):
    return scales(comm, weight, gradient, scale, lr * scale)


def averages_too(comm, weight, gradient, scale, lr):
    return scales(comm, weight, gradient, scale, lr / comm.world_size)


def never_looks(comm, weight, gradient, scale, lr):
    return [weight - lr * ring_all_reduce(comm, gradient) / scale, scale]


def only_lowers(comm, weight, gradient, scale, lr):
    ring_all_reduce(comm, gradient)
    lowered = scale if gradient.isfinite().all() else scale / 2
    return [weight - lr * gradient / scale, lowered]


def always_lowers(comm, weight, gradient, scale, lr):
    return [scales(comm, weight, gradient, scale, lr)[0], scale / 2]


def skips_number_by_number(comm, weight, gradient, scale, lr):
    finite = ring_all_reduce(comm, gradient).isfinite()
    updated = torch.where(finite, weight - lr * gradient / scale, weight)
    return [updated, scale if finite.all() else scale / 2]


def only_skips(comm, weight, gradient, scale, lr):
    return [scales(comm, weight, gradient, scale, lr)[0], scale]


def looks_too_early(comm, weight, gradient, scale, lr):
    finite = gradient.isfinite().all()
    ring_all_reduce(comm, gradient)
    return [weight - lr * gradient / scale, scale] if finite else [weight, scale / 2]


def scales_alone(comm, weight, gradient, scale, lr):
    return [weight - lr * gradient / scale, scale]


def asks_everyone(comm, weight, gradient, scale, lr):
    ring_all_reduce(comm, (~gradient.isfinite().all()).float().reshape(1))
    return scales(comm, weight, gradient, scale, lr)


# top_k(comm, gradient, residual, k)


def adds_up(comm, size, values, places):
    total = torch.zeros(size)
    for v, p in zip(all_gather(comm, values), all_gather(comm, places)):
        total.index_add_(0, p, v)
    return total


def sparse(comm, gradient, residual, k, order=torch.abs):
    left = gradient + residual
    places = order(left).topk(k).indices
    total = adds_up(comm, len(left), left[places], places)
    return [total, left.index_fill(0, places, 0.0)]


def overwrites_places(comm, gradient, residual, k):
    left = gradient + residual
    places, total = left.abs().topk(k).indices, torch.zeros_like(left)
    for v, p in zip(all_gather(comm, left[places]), all_gather(comm, places)):
        total[p] = v
    return [total, left.index_fill(0, places, 0.0)]


def forgets(comm, gradient, residual, k):
    total, left = sparse(comm, gradient, residual, k)
    return [total, torch.zeros_like(left)]


def ignores_the_residual(comm, gradient, residual, k):
    return sparse(comm, gradient, torch.zeros_like(residual), k)


def keeps_everything(comm, gradient, residual, k):
    return [sparse(comm, gradient, residual, k)[0], gradient + residual]


def keeps_what_it_sent(comm, gradient, residual, k):
    total, left = sparse(comm, gradient, residual, k)
    return [total, gradient + residual - left]


def takes_the_largest(comm, gradient, residual, k):
    return sparse(comm, gradient, residual, k, order=lambda values: values)


def sends_nothing(comm, gradient, residual, k):
    left = sparse(comm, gradient, residual, k)[1]
    return [gradient + residual - left, left]


def takes_the_mean(comm, gradient, residual, k):
    total, left = sparse(comm, gradient, residual, k)
    return [total / comm.world_size, left]


def sends_zeros_too(comm, gradient, residual, k):
    left = gradient + residual
    places = left.abs().topk(k).indices
    left = left.index_fill(0, places, 0.0)
    return [ring_all_reduce(comm, gradient + residual - left), left]


CHECKS = {
    "accumulate": (
        accumulates,
        [
            (means_of_means, "micro-batches of different sizes count alike"),
            (sums, "it is not divided by batch_size"),
            (divides_by_its_own, "divided by this rank's own samples"),
            (overwrites, "only the last micro-batch is in it"),
            (keeps_to_itself, "nothing of the other ranks is in it"),
            (ranks_alike, "every rank counts alike"),
            (synchronises_each, "messages"),
        ],
    ),
    "loss_scaling": (
        scales,
        [
            (never_unscales, "still multiplied by the scale"),
            (averages_too, "divided by the ranks, too"),
            (never_looks, "the update was made although the sum had overflowed"),
            (only_lowers, "the scale was lowered, and yet the update was made"),
            (always_lowers, "the scale was lowered although nothing had overflowed"),
            (skips_number_by_number, "only the numbers that had overflowed were left out"),
            (only_skips, "but the scale not lowered"),
            (looks_too_early, "ranks disagree: each looked at its own gradient"),
            (scales_alone, "this rank's own gradient alone"),
            (asks_everyone, "messages"),
        ],
    ),
    "top_k": (
        sparse,
        [
            (overwrites_places, "where two ranks send the same place, the last one wins"),
            (forgets, "what is not sent is lost"),
            (ignores_the_residual, "the old residual was not added"),
            (keeps_everything, "what was sent is in the residual, too"),
            (keeps_what_it_sent, "the new residual is what was sent"),
            (takes_the_largest, "not those largest in magnitude"),
            (sends_nothing, "this rank's own elements alone"),
            (takes_the_mean, "divided by the number of ranks"),
            (sends_zeros_too, "bytes"),
        ],
    ),
}


@pytest.fixture(scope="module")
def verdicts():
    found = {}
    for name, (right, wrong) in CHECKS.items():
        checker = getattr(check.one_device, name)
        for world_size in default_sizes(checker):
            found[name, world_size] = partial(checker, right, world_sizes=(world_size,))
        for answer, _ in wrong:
            found[answer] = partial(checker, answer, world_sizes=(3,))
    return in_shared_runs(found)


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_passes_and_each_mistake_has_its_name(name, verdicts):
    for world_size in default_sizes(getattr(check.one_device, name)):
        assert verdicts[name, world_size].passed, verdicts[name, world_size]
    for answer, words in CHECKS[name][1]:
        assert verdicts[answer].status == "not yet"
        assert words in " ".join(verdicts[answer].notes), answer.__name__


def test_a_stub_is_not_attempted_yet():
    def stub(*args):
        raise NotImplementedError

    for name in CHECKS:
        verdict = getattr(check.one_device, name)(stub)
        assert repr(verdict) == f"not attempted yet: one_device.{name}"
