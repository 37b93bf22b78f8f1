"""More answers to ``check.ddp``: right ones in unusual forms, wrong ones that look right."""

import itertools
from collections import deque

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value
from torch.nn import functional
from torch.utils.data import DistributedSampler

from answers.ddp import accumulates, averages, backward, padded, right_rule, samples, shuffled
from labkit import check
from labkit.collectives import naive_all_reduce, ring_all_reduce

travel_by_value(__name__)


# my_buckets(sizes_bytes, cap_bytes, first_cap_bytes)


def recursively(sizes_bytes, cap_bytes, first_cap_bytes):
    if not sizes_bytes:
        return []
    held = list(itertools.accumulate(reversed(sizes_bytes)))
    full = (place for place, total in enumerate(held) if total >= first_cap_bytes)
    closed = next(full, len(held) - 1)
    end = len(sizes_bytes) - closed - 1
    bucket = tuple(range(len(sizes_bytes) - 1, end - 1, -1))
    return [bucket, *recursively(sizes_bytes[:end], cap_bytes, cap_bytes)]


def yields_buckets(sizes_bytes, cap_bytes, first_cap_bytes):
    bucket, left = [], first_cap_bytes
    for place in range(len(sizes_bytes))[::-1]:
        bucket.append(place)
        left -= sizes_bytes[place]
        if left <= 0:
            yield tuple(bucket)
            bucket, left = [], cap_bytes
    if bucket:
        yield iter(bucket)


def with_numpy(sizes_bytes, cap_bytes, first_cap_bytes):
    order = np.arange(len(sizes_bytes))[::-1]
    sums, cuts, paid, cap = np.cumsum(np.array(sizes_bytes)[order]), [], 0, first_cap_bytes
    while (reached := np.searchsorted(sums, paid + cap)) < len(sums) - 1:
        cuts.append(reached + 1)
        paid, cap = sums[reached], cap_bytes
    return np.split(order, cuts)


def pops_from_the_end(sizes_bytes, cap_bytes, first_cap_bytes):
    buckets, caps = deque(), itertools.chain([first_cap_bytes], itertools.repeat(cap_bytes))
    while sizes_bytes:
        held, bucket, cap = 0, [], next(caps)
        while sizes_bytes and held < cap:
            held += sizes_bytes.pop()
            bucket.append(len(sizes_bytes))
        buckets.append(bucket)
    return buckets


def with_torch(sizes_bytes, cap_bytes, first_cap_bytes):
    found = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    return [torch.tensor(bucket) for bucket in found]


def closes_by_number(sizes_bytes, cap_bytes, first_cap_bytes):
    """The cap counts parameters, not their bytes."""
    return right_rule([1] * len(sizes_bytes), cap_bytes, first_cap_bytes)


def measures_all_from_the_start(sizes_bytes, cap_bytes, first_cap_bytes):
    """The second bucket is closed when both together hold its cap."""
    buckets, filling, held, cap = [], [], 0, first_cap_bytes
    for index in reversed(range(len(sizes_bytes))):
        filling.append(index)
        held += sizes_bytes[index]
        if held >= cap:
            buckets.append(filling)
            filling, cap = [], cap + cap_bytes
    return [*buckets, filling] if filling else buckets


def keeps_the_rest_in_the_last(sizes_bytes, cap_bytes, first_cap_bytes):
    *full, last = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    if full and sum(sizes_bytes[i] for i in last) < cap_bytes:
        full[-1] = full[-1] + last
        return full
    return [*full, last]


def one_list(sizes_bytes, cap_bytes, first_cap_bytes):
    return [*itertools.chain(*right_rule(sizes_bytes, cap_bytes, first_cap_bytes))]


def sizes_in_place_of_indices(sizes_bytes, cap_bytes, first_cap_bytes):
    found = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    return [[sizes_bytes[index] for index in bucket] for bucket in found]


def counts_down_to_one(sizes_bytes, cap_bytes, first_cap_bytes):
    found = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    return [[index + 1 for index in bucket] for bucket in found]


RIGHT_BUCKETS = [recursively, yields_buckets, with_numpy, pops_from_the_end, with_torch]
WRONG_BUCKETS = [
    (closes_by_number, "answer.wrong"),
    (measures_all_from_the_start, "answer.wrong"),
    (keeps_the_rest_in_the_last, "answer.wrong"),
    (one_list, "answer.wrong"),
    (sizes_in_place_of_indices, "answer.wrong"),
    (counts_down_to_one, "answer.wrong"),
    (lambda sizes, *caps: right_rule(sizes, *caps)[:-1] or [[0]], "answer.wrong"),
]


# average_gradients(comm, model, inputs, targets, batch_size)


def with_autograd_grad(comm, model, inputs, targets, batch_size):
    parameters = list(model.parameters())
    loss = functional.nll_loss(model(inputs).log_softmax(1), targets, reduction="none").sum()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = ring_all_reduce(comm, gradient.clone()) / batch_size


def weights_its_mean(comm, model, inputs, targets, batch_size):
    """A mean over no samples is NaN: such a rank contributes zeros."""
    model.zero_grad(set_to_none=False)
    if len(targets):
        (functional.cross_entropy(model(inputs), targets) * len(targets) / batch_size).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        ring_all_reduce(comm, parameter.grad)


def sums_in_a_hook(comm, model, inputs, targets, batch_size):
    def reduce_it(parameter):
        ring_all_reduce(comm, parameter.grad.div_(batch_size))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce_it)
    backward(model, inputs, targets)


def sample_by_sample(comm, model, inputs, targets, batch_size):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for sample, target in zip(inputs, targets):
        (functional.cross_entropy(model(sample), target) / batch_size).backward()
    for parameter in reversed(list(model.parameters())):
        ring_all_reduce(comm, parameter.grad)


def takes_the_mean_over_ranks(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size / comm.world_size)
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad, "mean")


def in_one_flat_ring(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    ring_all_reduce(comm, flat)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter)


def makes_the_update_too(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def returns_the_gradients(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    return [ring_all_reduce(comm, p.grad.clone()) for p in model.parameters()]


def through_rank_0(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    for parameter in model.parameters():
        naive_all_reduce(comm, parameter.grad)


def leaves_the_biases_out(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    for parameter in model.parameters():
        total = ring_all_reduce(comm, parameter.grad.clone())
        if parameter.dim() > 1:
            parameter.grad = total


def sums_before_backward(comm, model, inputs, targets, batch_size):
    for parameter in model.parameters():
        parameter.grad = ring_all_reduce(comm, torch.zeros_like(parameter))
    backward(model, inputs, targets, batch_size)


def weights_by_ranks_with_samples(comm, model, inputs, targets, batch_size):
    """The mean over the ranks that have samples: right if they have equally many."""
    averages(comm, model, inputs, targets, max(len(targets), 1) * (comm.world_size - 1))


def in_bfloat16(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.bfloat16().float()


def sums_the_loss_alone(comm, model, inputs, targets, batch_size):
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / batch_size
    with torch.no_grad():
        total = ring_all_reduce(comm, loss.detach().clone().reshape(1))
    (loss + (total - loss.detach()).sum()).backward()


RIGHT_AVERAGES = [
    with_autograd_grad,
    weights_its_mean,
    sums_in_a_hook,
    sample_by_sample,
    takes_the_mean_over_ranks,
    in_one_flat_ring,
]
WRONG_AVERAGES = [
    (makes_the_update_too, "gradient.updated"),
    (returns_the_gradients, "gradient.own_share"),
    (through_rank_0, "traffic.off_target"),
    (leaves_the_biases_out, "value.numbers"),
    (sums_before_backward, "gradient.own_share"),
    (weights_by_ranks_with_samples, "value.numbers"),
    (in_bfloat16, "value.wrong"),
    (sums_the_loss_alone, "gradient.own_share"),
]


# accumulate(comm, model, micro_batches, batch_size)


def adds_up_the_losses(comm, model, micro_batches, batch_size):
    losses = [functional.cross_entropy(model(x), y, reduction="sum") for x, y in micro_batches]
    (sum(losses) / batch_size).backward()
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad)


def in_one_batch(comm, model, micro_batches, batch_size):
    inputs, targets = (torch.cat(part) for part in zip(*micro_batches))
    averages(comm, model, inputs, targets, batch_size)


def divides_at_the_end(comm, model, micro_batches, batch_size):
    for inputs, targets in reversed(micro_batches):
        functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad).mul_(1 / batch_size)


def sums_in_the_last_backward(comm, model, micro_batches, batch_size):
    """A hook that is set for the last micro-batch alone, as in DDP after no_sync."""

    def reduce_it(parameter):
        ring_all_reduce(comm, parameter.grad)

    *first, last = micro_batches
    for inputs, targets in first:
        backward(model, inputs, targets, batch_size)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce_it)
    backward(model, *last, batch_size)


def keeps_sums_apart(comm, model, micro_batches, batch_size):
    parameters = list(model.parameters())
    totals = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for inputs, targets in micro_batches:
        loss = functional.cross_entropy(model(inputs), targets) * len(targets) / batch_size
        for total, gradient in zip(totals, torch.autograd.grad(loss, parameters)):
            total += gradient
    for parameter, total in zip(parameters, totals):
        parameter.grad = ring_all_reduce(comm, total.float())


def leaves_the_last_one_out(comm, model, micro_batches, batch_size):
    accumulates(comm, model, micro_batches[:-1], batch_size)


def counts_its_own_samples(comm, model, micro_batches, batch_size):
    accumulates(comm, model, micro_batches, sum(len(y) for _, y in micro_batches))


def divides_the_sum_by_ranks(comm, model, micro_batches, batch_size):
    accumulates(comm, model, micro_batches, batch_size * comm.world_size)


def updates_every_time(comm, model, micro_batches, batch_size):
    for inputs, targets in micro_batches:
        backward(model, inputs, targets, batch_size)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad)


def takes_the_first_thrice(comm, model, micro_batches, batch_size):
    accumulates(comm, model, micro_batches[:1] * 3, batch_size)


def sums_twice(comm, model, micro_batches, batch_size):
    accumulates(comm, model, micro_batches, batch_size * comm.world_size)
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad)


RIGHT_ACCUMULATIONS = [
    adds_up_the_losses,
    in_one_batch,
    divides_at_the_end,
    sums_in_the_last_backward,
    keeps_sums_apart,
]
WRONG_ACCUMULATIONS = [
    (leaves_the_last_one_out, "gradient.without_last"),
    (counts_its_own_samples, "gradient.over_own"),
    (divides_the_sum_by_ranks, "gradient.twice_by_ranks"),
    (updates_every_time, "gradient.updated"),
    (takes_the_first_thrice, "value.numbers"),
    (sums_twice, "traffic.doubled"),
]


# my_samples(comm, num_samples, epoch, seed)


def asks_pytorch(comm, num_samples, epoch, seed):
    sampler = DistributedSampler(range(num_samples), comm.world_size, comm.rank, seed=seed)
    sampler.set_epoch(epoch)
    return iter(sampler)


def as_a_tensor(comm, num_samples, epoch, seed):
    order = torch.tensor(shuffled(num_samples, seed + epoch))
    places = torch.arange(-(-num_samples // comm.world_size)) * comm.world_size + comm.rank
    return order[places % num_samples]


def as_an_array(comm, num_samples, epoch, seed):
    order = np.array(shuffled(num_samples, seed + epoch))
    rows = -(-num_samples // comm.world_size)
    return np.resize(order, (rows, comm.world_size))[:, comm.rank]


def walks_in_circles(comm, num_samples, epoch, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed + epoch)
        circle = itertools.cycle(torch.randperm(num_samples).tolist())
    total = num_samples + -num_samples % comm.world_size
    return itertools.islice(circle, comm.rank, total, comm.world_size)


def deals_out_like_cards(comm, num_samples, epoch, seed):
    hands = [deque() for _ in range(comm.world_size)]
    for place, sample in enumerate(padded(shuffled(num_samples, seed + epoch), comm.world_size)):
        hands[place % comm.world_size].append(np.int64(sample))
    return tuple(hands[comm.rank])


def pads_once(comm, num_samples, epoch, seed):
    """Right unless there are fewer samples than are missing."""
    order = shuffled(num_samples, seed + epoch)
    order += order[: -num_samples % comm.world_size]
    return order[comm.rank :: comm.world_size]


def multiplies_the_seed(comm, num_samples, epoch, seed):
    return samples(comm, num_samples, 0, seed * (epoch + 1))


def seeds_with_5(comm, num_samples, epoch, seed):
    return samples(comm, num_samples, epoch, 5)


def shuffles_its_share(comm, num_samples, epoch, seed):
    mine = padded(list(range(num_samples)), comm.world_size)[comm.rank :: comm.world_size]
    return [mine[place] for place in shuffled(len(mine), seed + epoch)]


def indices_as_floats(comm, num_samples, epoch, seed):
    return [float(index) for index in samples(comm, num_samples, epoch, seed)]


def pads_before_shuffling(comm, num_samples, epoch, seed):
    order = padded(list(range(num_samples)), comm.world_size)
    mixed = [order[place] for place in shuffled(len(order), seed + epoch)]
    return mixed[comm.rank :: comm.world_size]


def sends_the_seed_around(comm, num_samples, epoch, seed):
    ring_all_reduce(comm, torch.tensor([float(seed)]), "max")
    return samples(comm, num_samples, epoch, seed)


def from_the_end(comm, num_samples, epoch, seed):
    return samples(comm, num_samples, epoch, seed)[::-1]


RIGHT_SAMPLES = [
    asks_pytorch,
    as_a_tensor,
    as_an_array,
    walks_in_circles,
    deals_out_like_cards,
]
WRONG_SAMPLES = [
    (pads_once, "value.wrong"),
    (multiplies_the_seed, "value.differs"),
    (seeds_with_5, "value.differs"),
    (shuffles_its_share, "value.differs"),
    (indices_as_floats, "sampler.kind"),
    (pads_before_shuffling, "value.differs"),
    (sends_the_seed_around, "traffic.off_target"),
    (from_the_end, "value.differs"),
]


ANSWERS = [
    Answers(check.ddp.buckets, RIGHT_BUCKETS, WRONG_BUCKETS),
    Answers(check.ddp.average, RIGHT_AVERAGES, WRONG_AVERAGES, 4),
    Answers(check.ddp.accumulate, RIGHT_ACCUMULATIONS, WRONG_ACCUMULATIONS, 4),
    Answers(check.ddp.sampler, RIGHT_SAMPLES, WRONG_SAMPLES),
]
