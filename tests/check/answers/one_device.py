"""Answers to ``check.one_device``."""

import torch
from graded import Answers
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


ANSWERS = [
    Answers(
        check.one_device.accumulate,
        [accumulates],
        [
            (means_of_means, "accumulate.mean_of_means"),
            (sums, "accumulate.sum"),
            (divides_by_its_own, "accumulate.own_samples"),
            (overwrites, "accumulate.last"),
            (keeps_to_itself, "accumulate.own_share"),
            (ranks_alike, "accumulate.mean_of_rank_means"),
            (synchronises_each, "traffic.off_target"),
        ],
    ),
    Answers(
        check.one_device.loss_scaling,
        [scales],
        [
            (never_unscales, "scaling.still_scaled"),
            (averages_too, "scaling.over_ranks"),
            (never_looks, "scaling.update_anyway"),
            (only_lowers, "scaling.lowered_and_updated"),
            (always_lowers, "scaling.lowered_for_nothing"),
            (skips_number_by_number, "scaling.patched"),
            (only_skips, "scaling.not_lowered"),
            (looks_too_early, "scaling.ranks_disagree"),
            (scales_alone, "scaling.own_gradient"),
            (asks_everyone, "traffic.off_target"),
        ],
    ),
    Answers(
        check.one_device.top_k,
        [sparse],
        [
            (overwrites_places, "top_k.last_wins"),
            (forgets, "top_k.lost"),
            (ignores_the_residual, "top_k.forgot_residual"),
            (keeps_everything, "top_k.sent_and_kept"),
            (keeps_what_it_sent, "top_k.kept_the_sent"),
            (takes_the_largest, "top_k.not_by_magnitude"),
            (sends_nothing, "top_k.own_alone"),
            (takes_the_mean, "top_k.mean"),
            (sends_zeros_too, "traffic.off_target"),
        ],
    ),
]
