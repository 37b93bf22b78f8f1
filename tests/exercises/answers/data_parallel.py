"""Answers to ``check.data_parallel``."""

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value
from torch import nn
from torch.nn import functional

from workbook import check

travel_by_value(__name__)


# scatter(inputs, num_devices)


def splits(inputs, num_devices):
    return list(inputs.tensor_split(min(num_devices, len(inputs))))


def keeps_empty_parts(inputs, num_devices):
    return inputs.tensor_split(num_devices)


def chunks(inputs, num_devices):
    return list(inputs.chunk(num_devices))


def deals_out(inputs, num_devices):
    return [inputs[i::num_devices] for i in range(min(num_devices, len(inputs)))]


def drops_the_rest(inputs, num_devices):
    return list(inputs.split(max(1, len(inputs) // num_devices)))[:num_devices]


def gives_the_rest_to_the_last(inputs, num_devices):
    size = len(inputs) // num_devices
    first = [inputs[i * size : (i + 1) * size] for i in range(num_devices - 1)]
    return [*first, inputs[(num_devices - 1) * size :]]


def gives_all_to_all(inputs, num_devices):
    return [inputs] * num_devices


def gives_one_each(inputs, num_devices):
    return list(inputs.split(1))


# replicate(model, num_devices)


def copies(model, num_devices):
    return [model, *(copy.deepcopy(model) for _ in range(num_devices - 1))]


def copies_of_copies(model, num_devices):
    replicas = (model,)
    while len(replicas) < num_devices:
        replicas += (copy.deepcopy(replicas[-1]),)
    return replicas


def through_bytes(model, num_devices):
    yield model
    for _ in range(1, num_devices):
        yield pickle.loads(pickle.dumps(model))


def through_a_file(model, num_devices):
    file = io.BytesIO()
    torch.save(model, file)
    loaded = []
    for _ in range(num_devices - 1):
        file.seek(0)
        loaded.append(torch.load(file, weights_only=False))
    return [model, *loaded]


def in_a_module_list(model, num_devices):
    return nn.ModuleList([model] + [copy.deepcopy(model) for _ in range(num_devices - 1)])


def layers_anew(model, num_devices):
    """New layers, filled with the model's state, and frozen where the model is."""
    replicas = [model]
    for _ in range(num_devices - 1):
        replica = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        replica.load_state_dict(model.state_dict())
        for own, given in zip(replica.parameters(), model.parameters()):
            own.requires_grad_(given.requires_grad)
        replicas.append(replica)
    return replicas


def by_recursion_over_devices(model, num_devices):
    return [model] if num_devices == 1 else [*copies(model, num_devices - 1), copies(model, 2)[1]]


def repeats_the_model(model, num_devices):
    return [model] * num_devices


def repeats_one_copy(model, num_devices):
    return [model] + [copy.deepcopy(model)] * (num_devices - 1)


def copies_the_first(model, num_devices):
    return [copy.deepcopy(model) for _ in range(num_devices)]


def copies_flatly(model, num_devices):
    return [model, *(copy.copy(model) for _ in range(num_devices - 1))]


def one_too_many(model, num_devices):
    return [model, *(copy.deepcopy(model) for _ in range(num_devices))]


def only_the_others(model, num_devices):
    return copies(model, num_devices)[1:]


def new_layers(model, num_devices):
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    return [model, *(copy.deepcopy(nn.Sequential(*layers)) for _ in range(num_devices - 1))]


def without_buffers(model, num_devices):
    replicas = copies(model, num_devices)
    for replica in replicas[1:]:
        replica[1].reset_running_stats()
    return replicas


def thawed(model, num_devices):
    replicas = copies(model, num_devices)
    for replica in replicas[1:]:
        replica.requires_grad_(True)
    return replicas


def without_parameters(model, num_devices):
    return [model, *(nn.Sequential() for _ in range(num_devices - 1))]


def zeroes_the_model(model, num_devices):
    replicas = copies(model, num_devices)
    with torch.no_grad():
        model[2].bias.zero_()
    return replicas


# gather(outputs, targets)


def gathers(outputs, targets):
    gathered = torch.cat([output.detach() for output in outputs]).requires_grad_()
    loss = functional.cross_entropy(gathered, targets)
    loss.backward()
    return loss.item(), gathered.grad.split([len(output) for output in outputs])


def asks_autograd(outputs, targets):
    loss = functional.cross_entropy(torch.cat(outputs), targets)
    return [loss, list(torch.autograd.grad(loss, outputs))]


def by_formula(outputs, targets):
    """softmax - one-hot, over n."""
    gathered = torch.vstack([*outputs]).detach()
    share = gathered.softmax(1)
    loss = -share[torch.arange(len(targets)), targets].log().mean()
    gradient = (share - functional.one_hot(targets, gathered.shape[1])) / len(targets)
    rows = iter(gradient)
    return loss, (torch.stack([next(rows) for _ in output]) for output in outputs)


def in_numpy_parts(outputs, targets):
    gathered = np.concatenate([output.detach().numpy() for output in outputs])
    share = np.exp(gathered - gathered.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    gradient, places = share.copy(), np.arange(len(targets))
    gradient[places, targets.numpy()] -= 1
    cuts = np.cumsum([len(output) for output in outputs])[:-1]
    loss = -np.log(share[places, targets.numpy()]).mean()
    return loss, np.split(gradient / len(targets), cuts)


def part_by_part(outputs, targets):
    """Each device's sum, over the number of all samples: no tensor of the whole batch."""
    total, gradients = 0.0, []
    for output, own in zip(outputs, targets.split([len(output) for output in outputs])):
        leaf = output.detach().requires_grad_()
        loss = functional.cross_entropy(leaf, own, reduction="sum") / len(targets)
        gradients += torch.autograd.grad(loss, [leaf])
        total += loss.item()
    return total, tuple(gradients)


def in_float64(*, targets, outputs):
    leaves = [output.detach().double().requires_grad_() for output in outputs]
    loss = functional.nll_loss(torch.cat(leaves).log_softmax(-1), targets)
    loss.backward()
    return {"loss": loss.detach(), "gradients": [leaf.grad for leaf in leaves]}.values()


def with_means(outputs, targets):
    leaves = [output.detach().requires_grad_() for output in outputs]
    own = targets.split([len(output) for output in outputs])
    loss = sum(map(functional.cross_entropy, leaves, own)) / len(outputs)
    return loss, list(torch.autograd.grad(loss, leaves))


def with_a_sum(outputs, targets):
    loss = functional.cross_entropy(torch.cat(outputs), targets, reduction="sum")
    return loss, list(torch.autograd.grad(loss, outputs))


def all_to_each(outputs, targets):
    loss, parts = gathers(outputs, targets)
    return loss, [torch.cat(parts)] * len(outputs)


def of_its_own_mean(outputs, targets):
    loss, parts = gathers(outputs, targets)
    return loss, [part * (len(targets) / len(part)) for part in parts]


def cuts_equally(outputs, targets):
    loss, parts = gathers(outputs, targets)
    return loss, torch.cat(parts).tensor_split(len(outputs))


def runs_on(outputs, targets):
    for output in outputs:
        output.retain_grad()
    loss = functional.cross_entropy(torch.cat(outputs), targets)
    loss.backward()
    return loss, [output.grad for output in outputs]


def backward_only(outputs, targets):
    loss = functional.cross_entropy(torch.cat(outputs), targets)
    loss.backward()
    return loss, [output.grad for output in outputs]


def other_loss(outputs, targets):
    return 2 * gathers(outputs, targets)[0], gathers(outputs, targets)[1]


def from_the_last(outputs, targets):
    loss, parts = gathers(outputs, targets)
    return loss, list(parts)[::-1]


# parallel_apply(functions, inputs)


def runs(functions, inputs):
    grad = torch.is_grad_enabled()

    def with_mode(function, argument):
        with torch.set_grad_enabled(grad):
            return function(argument)

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(with_mode, functions, inputs))


def uses_no_threads(functions, inputs):
    return [function(argument) for function, argument in zip(functions, inputs)]


def in_threads(functions, inputs, wait):
    results = {}

    def work(place):
        results[place] = functions[place](inputs[place])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
        if wait == "at once":
            thread.join()
    for thread in threads if wait == "at the end" else ():
        thread.join()
    return results


def waits_for_each(functions, inputs):
    return list(in_threads(functions, inputs, "at once").values())


def loses_exceptions(functions, inputs):
    results = in_threads(functions, inputs, "at the end")
    return [results.get(place) for place in range(len(functions))]


def orders_by_end(functions, inputs):
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(f, x) for f, x in zip(functions, inputs)]
        return [future.result() for future in as_completed(futures)]


def never_waits(functions, inputs):
    results = in_threads(functions, inputs, "never")
    return [results.get(place) for place in range(len(functions))]


def forgets_the_mode(functions, inputs):
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda f, x: f(x), functions, inputs))


def never_records(functions, inputs):
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(torch.no_grad()(lambda f, x: f(x)), functions, inputs))


def asks_all_but_the_first(functions, inputs):
    results = in_threads(functions, inputs, "at the end")
    errors = set(range(1, len(functions))) - results.keys()
    if errors:
        raise KeyError(errors)
    return [results.get(place) for place in range(len(functions))]


def raises_its_own(functions, inputs):
    try:
        return runs(functions, inputs)
    except KeyError:
        raise RuntimeError("a thread failed") from None


# reduce(gradients)


def adds(gradients):
    sums = []
    for column in zip(*gradients):
        there = [gradient for gradient in column if gradient is not None]
        sums.append(sum(there[1:], there[0]) if there else None)
    return sums


def takes_means(gradients):
    return [total if total is None else total / len(gradients) for total in adds(gradients)]


def means_of_those_there(gradients):
    counts = [sum(g is not None for g in column) for column in zip(*gradients)]
    return [total if total is None else total / n for n, total in zip(counts, adds(gradients))]


def zeros_for_none(gradients):
    return [torch.zeros(4) if total is None else total for total in adds(gradients)]


def keeps_the_first(gradients):
    return gradients[0]


def leaves_the_first_out(gradients):
    return adds(gradients[1:])


def follows_the_first(gradients):
    return [None if g is None else total for g, total in zip(gradients[0], adds(gradients))]


def wants_all(gradients):
    columns = list(zip(*gradients))
    whole = [all(g is not None for g in column) for column in columns]
    return [total if there else None for there, total in zip(whole, adds(gradients))]


def stops_early(gradients):
    return adds(gradients[:2])


def adds_into_the_last(gradients):
    sums = adds(gradients)
    for gradient, total in zip(gradients[-1], sums):
        if gradient is not None:
            gradient.copy_(total)
    return sums


def returns_one(gradients):
    return adds(gradients)[0]


ANSWERS = [
    Answers(
        check.data_parallel.scatter,
        [splits],
        [
            (keeps_empty_parts, "scatter_fairly.empty_device"),
            (chunks, "scatter_fairly.chunk"),
            (deals_out, "scatter_fairly.in_turn"),
            (drops_the_rest, "scatter_fairly.dropped"),
            (gives_the_rest_to_the_last, "scatter_fairly.rest_to_last"),
            (gives_all_to_all, "scatter_fairly.whole_batch"),
            (gives_one_each, "scatter_fairly.one_each"),
        ],
    ),
    Answers(
        check.data_parallel.replicate,
        [
            copies,
            copies_of_copies,
            through_bytes,
            through_a_file,
            in_a_module_list,
            layers_anew,
            by_recursion_over_devices,
        ],
        [
            (repeats_the_model, "copies.one_module", "entries 0 and 1"),
            (repeats_one_copy, "copies.one_module", "entries 1 and 2"),
            (copies_the_first, "copies.first_copied"),
            (copies_flatly, "copies.shared_memory"),
            (one_too_many, "copies.count", "returned 4 modules"),
            (only_the_others, "copies.count"),
            (lambda model, num_devices: model, "copies.count"),
            (lambda model, num_devices: None, "copies.count"),
            (new_layers, "copies.numbers"),
            (without_buffers, "copies.buffer"),
            (thawed, "copies.frozen"),
            (without_parameters, "copies.names"),
            (zeroes_the_model, "copies.numbers", "replica 0"),
        ],
        1,
    ),
    Answers(
        check.data_parallel.gather,
        [gathers, asks_autograd, by_formula, in_numpy_parts, part_by_part, in_float64],
        [
            (with_means, "gather_loss.mean_of_means"),
            (with_a_sum, "gather_loss.sum"),
            (all_to_each, "gather_loss.whole"),
            (of_its_own_mean, "gather_loss.own_mean"),
            (cuts_equally, "gather_loss.equal_parts"),
            (runs_on, "gather_loss.ran_on", "not gather_loss.gradients"),
            (backward_only, "gather_loss.ran_on", "gather_loss.gradients"),
            (other_loss, "gather_loss.loss"),
            (from_the_last, "gather_loss.gradients"),
            (lambda outputs, targets: gathers(outputs, targets)[0], "gather_loss.kind"),
            (lambda outputs, targets: None, "gather_loss.kind"),
        ],
        1,
    ),
    Answers(
        check.data_parallel.parallel_apply,
        [runs],
        [
            (uses_no_threads, "threads.none"),
            (waits_for_each, "threads.one_by_one"),
            (loses_exceptions, "threads.lost_error"),
            (orders_by_end, "threads.order"),
            (never_waits, "threads.not_waited"),
            (forgets_the_mode, "threads.record"),
            (never_records, "threads.do_not_record"),
            (asks_all_but_the_first, "threads.other_words"),
            (raises_its_own, "threads.other_error"),
        ],
    ),
    Answers(
        check.data_parallel.reduce,
        [adds],
        [
            (takes_means, "sum_devices.mean"),
            (means_of_those_there, "sum_devices.mean_of_some"),
            (zeros_for_none, "sum_devices.zeros"),
            (keeps_the_first, "sum_devices.first_alone"),
            (leaves_the_first_out, "sum_devices.first_missing"),
            (follows_the_first, "sum_devices.follows_first"),
            (wants_all, "sum_devices.wants_all"),
            (stops_early, "sum_devices.two_alone"),
            (adds_into_the_last, "sum_devices.others_changed"),
            (returns_one, "sum_devices.kind"),
        ],
    ),
]
