"""Answers to ``check.one_device``."""

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check
from labkit.collectives import all_gather, ring_all_reduce

travel_by_value(__name__)


# loss_scaling(comm, weight, gradient, scale, lr)


def in_a_tuple(comm, weight, gradient, scale, lr):
    total = ring_all_reduce(comm, gradient.clone())
    finite = bool(torch.isfinite(total).all())
    return (weight.sub(total, alpha=lr / scale), scale) if finite else (weight, 0.5 * scale)


def by_its_largest(comm, weight, gradient, scale, lr):
    ring_all_reduce(comm, gradient)
    if gradient.abs().max() < float("inf"):
        return weight.add_(gradient / scale, alpha=-lr), torch.tensor(scale)
    return weight, torch.tensor(scale / 2)


def by_its_sum(comm, weight, gradient, scale, lr):
    """Infinity minus infinity is NaN, so a sum that is finite has no infinity in it."""
    ring_all_reduce(comm, gradient)
    total = gradient.double().sum().item()
    overflowed = total in (float("inf"), float("-inf")) or total != total
    return [weight if overflowed else weight - gradient * lr / scale, scale / (1 + overflowed)]


def with_numpy(comm, weight, gradient, scale, lr):
    total = ring_all_reduce(comm, gradient).numpy()
    if np.isfinite(total).all():
        return np.subtract(weight.numpy(), lr * total / scale), np.float32(scale)
    return weight.numpy(), np.float32(scale / 2)


def unscales_first(comm, weight, gradient, scale, lr):
    mine = gradient / scale
    ring_all_reduce(comm, mine)
    while not mine.isfinite().all():
        return weight, scale / 2
    weight -= lr * mine
    return weight, scale


def quarters(comm, weight, gradient, scale, lr):
    new, after = scales(comm, weight, gradient, scale, lr)
    return [new, after if after == scale else scale / 4]


def looks_at_one_place(comm, weight, gradient, scale, lr):
    ring_all_reduce(comm, gradient)
    if not gradient[0].isfinite():
        return [weight, scale / 2]
    return [weight - lr * gradient / scale, scale]


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


def by_sorting(comm, gradient, residual, k):
    left = (gradient + residual).tolist()
    places = sorted(range(len(left)), key=lambda place: -abs(left[place]))[:k]
    mine = torch.tensor([left[place] for place in places])
    total = adds_up(comm, len(left), mine, torch.tensor(places))
    return total, torch.tensor([0.0 if p in places else v for p, v in enumerate(left)])


def by_partition(comm, gradient, residual, k):
    left = gradient.numpy() + residual.numpy()
    places = np.argpartition(np.abs(left), -k)[-k:]
    total = adds_up(comm, len(left), torch.from_numpy(left[places]), torch.from_numpy(places))
    left[places] = 0
    return total.numpy(), left


def by_a_ring(comm, gradient, residual, k):
    """Pairs travel around: as many bytes as all_gather."""
    left = gradient + residual
    places = left.abs().argsort(descending=True)[:k]
    total = torch.zeros_like(left).index_add(0, places, left[places])
    right, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    values, at = left[places], places
    for _ in range(comm.world_size - 1):
        values = comm.exchange(values, right, torch.empty_like(values), before)
        at = comm.exchange(at, right, torch.empty_like(at), before)
        total.scatter_add_(0, at, values)
    return [total, left.masked_fill(torch.zeros(len(left)).bool().index_fill(0, places, 1), 0)]


def with_short_places(comm, gradient, residual, k):
    """Places of four bytes: fewer bytes than asked."""
    left = gradient + residual
    places = left.abs().topk(k).indices
    total = torch.zeros_like(left)
    for v, p in zip(all_gather(comm, left[places]), all_gather(comm, places.int())):
        total.index_add_(0, p, v)
    left[places] = 0
    return total, left


def in_place_of_the_residual(comm, gradient, residual, k):
    residual += gradient
    places = torch.topk(residual.abs(), k, sorted=False).indices
    total = adds_up(comm, len(residual), residual[places], places)
    residual[places] = 0
    yield total
    yield residual


def sends_one_fewer(comm, gradient, residual, k):
    return sparse(comm, gradient, residual, k - 1)


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
        check.one_device.loss_scaling,
        [scales, in_a_tuple, by_its_largest, by_its_sum, with_numpy, unscales_first],
        [
            (quarters, "value.wrong"),
            (looks_at_one_place, "scaling.update_anyway"),
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
        [
            sparse,
            by_sorting,
            by_partition,
            by_a_ring,
            with_short_places,
            in_place_of_the_residual,
        ],
        [
            (sends_one_fewer, "value.wrong"),
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
