"""Answers to ``check.experts``."""

from functools import partial

import torch
from graded import Answers

from labkit.collectives import all_gather, all_to_all
from workbook import check

# route(logits, k)


def by_sorting(logits, k, divides=True):
    probabilities = torch.exp(logits - logits.logsumexp(1, keepdim=True))
    order = probabilities.argsort(dim=1, descending=True)[:, :k]
    weights = probabilities.gather(1, order)
    if k > 1 and divides:
        weights = weights / weights.sum(1, keepdim=True)
    return order, weights


def softmax_of_the_chosen(logits, k):
    """The same for k > 1, as a softmax divides by its sum; for k = 1 always 1."""
    top, experts = logits.topk(k)
    return experts, top.softmax(1)


def in_int32(logits, k):
    experts, weights = by_sorting(logits, k)
    return experts.int(), weights


def least_probable(logits, k):
    return by_sorting(-logits, k)


def without_gradient(logits, k):
    return by_sorting(logits.detach(), k)


# kept(experts, num_experts, most)


def by_expert(experts, num_experts, most, last=False):
    indices = []
    for expert in range(num_experts):
        of_expert = [i for i, chosen in enumerate(experts) if chosen == expert]
        indices += of_expert[-most:] if last else of_expert[:most]
    return sorted(indices)


# exchange(comm, rows, counts)


def by_collective(comm, rows, counts):
    numbers = [torch.tensor([count]) for count in counts]
    arriving = [int(number) for number in all_to_all(comm, numbers)]
    out = [rows.new_empty(count, rows.shape[1]) for count in arriving]
    return torch.cat(all_to_all(comm, list(rows.split(counts)), out))


def by_hand(comm, rows, counts, reverse=False):
    parts = list(rows.split(counts))
    arrived = [None] * comm.world_size
    arrived[comm.rank] = parts[comm.rank]
    for step in range(1, comm.world_size):
        dst, src = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
        count = torch.zeros(1, dtype=torch.int64)
        comm.exchange(torch.tensor([counts[dst]]), dst, count, src)
        arrived[src] = rows.new_empty(int(count), rows.shape[1])
        if counts[dst] and count:
            comm.exchange(parts[dst], dst, arrived[src], src)
        elif counts[dst]:
            comm.send(parts[dst], dst)
        elif count:
            comm.recv(arrived[src], src)
    return torch.cat(arrived[::-1] if reverse else arrived)


def pads_to_the_longest(comm, rows, counts):
    """The right rows, with more bytes than they have."""
    table = [each.tolist() for each in all_gather(comm, torch.tensor(counts))]
    most = max(map(max, table))
    padded = [
        torch.cat([part, part.new_zeros(most - len(part), 3)]) for part in rows.split(counts)
    ]
    arrived = all_to_all(comm, padded)
    return torch.cat([each[: table[src][comm.rank]] for src, each in enumerate(arrived)])


def keeps_its_own_out(comm, rows, counts):
    arrived = by_collective(comm, rows, counts)
    return arrived[: len(arrived) - counts[comm.rank]]


# balance(probabilities, experts)


def in_numbers(probabilities, experts, factor=True, mean=True, detach=False):
    num_experts = probabilities.shape[1]
    chosen = torch.zeros(num_experts)
    for expert in experts.flatten().tolist():
        chosen[expert] += 1
    per_expert = probabilities.mean(0) if mean else probabilities.sum(0)
    loss = (chosen / experts.numel() * per_expert).sum()
    if factor:
        loss = loss * num_experts
    return loss.detach() if detach else loss


def divides_by_tokens(probabilities, experts):
    return in_numbers(probabilities, experts) * experts.shape[1]


def knows_chosen_experts_alone(probabilities, experts):
    num_experts = int(experts.max()) + 1
    return in_numbers(probabilities, experts) * num_experts / probabilities.shape[1]


# layer_bytes(tokens, k, features, world_size, element_bytes)


ANSWERS = [
    Answers(
        check.experts.route,
        [by_sorting, lambda logits, k: by_sorting(logits.double(), k)],
        [
            softmax_of_the_chosen,
            least_probable,
            partial(by_sorting, divides=False),
            in_int32,
            without_gradient,
        ],
    ),
    Answers(
        check.experts.kept,
        [by_expert],
        [partial(by_expert, last=True), lambda experts, *_: list(range(len(experts)))],
    ),
    Answers(
        check.experts.exchange,
        [by_collective, by_hand],
        [pads_to_the_longest, keeps_its_own_out, partial(by_hand, reverse=True)],
    ),
    Answers(
        check.experts.balance,
        [in_numbers],
        [
            partial(in_numbers, factor=False),
            partial(in_numbers, mean=False),
            partial(in_numbers, detach=True),
            divides_by_tokens,
            knows_chosen_experts_alone,
        ],
    ),
    Answers(
        check.experts.layer_bytes,
        [lambda n, k, d, p, size: 4 * k * n * (p - 1) * d * size // p],
        [lambda n, k, d, p, size: 4 * k * n * d * size],
    ),
]
