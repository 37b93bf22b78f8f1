"""Right answers to ``check.elsewhere``, in other clothes."""

import math

import torch
import torch.distributed as dist
from graded import Answers
from ranks import travel_by_value
from torch import func, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import labkit.horovod as hvd
from answers.elsewhere import (
    Back,
    Port,
    average_all,
    back,
    by_hand,
    checkpoint,
    end_with,
    load,
    port,
    right_end,
    semantics,
    share_state,
)
from workbook import check

travel_by_value(__name__)


# to_ddp


def as_on_the_page(model, dataset, batch_size, lr, epochs, start, save):
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * size, momentum=0.9)
    found = [start]
    dist.broadcast_object_list(found, src=0)
    load(found[0], model, optimizer)
    replica = DistributedDataParallel(model)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(replica(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if dist.get_rank() == 0:
        save(checkpoint(model, optimizer))
    dist.destroy_process_group()
    return losses


def with_a_hook(self, model, start):
    replica = Port.begin(self, model, start)
    replica.register_comm_hook(None, default_hooks.allreduce_hook)
    return replica


def with_own_hook(self, model, start):
    replica = Port.begin(self, model, start)

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(self.P), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    replica.register_comm_hook(None, hook)
    return replica


def in_tiny_buckets(self, model, start):
    Port.begin(self, model, start)
    options = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}
    return DistributedDataParallel(model, forward_sync_buffers=False, **options)


def momentum_by_tensors(self, model, start):
    """Loaded on rank 0, then broadcast one by one."""
    load(start, model, self.optimizer)
    lr = self.optimizer.param_groups[0]["lr"]
    rates = torch.tensor([lr, start is not None], dtype=torch.float64)
    dist.broadcast(rates, src=0)
    self.optimizer.param_groups[0]["lr"] = rates[0].item()
    for parameter in model.parameters():
        if rates[1]:
            state = self.optimizer.state[parameter]
            momentum = state.setdefault("momentum_buffer", torch.empty_like(parameter.data))
            dist.broadcast(momentum, src=0)
    return DistributedDataParallel(model)


def everyone_gets_it(self, start):
    found = [None] * self.P
    dist.all_gather_object(found, start)
    return next((one for one in found if one is not None), None)


def at_once(self, model):
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    pieces = flat.div(self.P).split([p.numel() for p in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad.copy_(piece.view_as(parameter))


def while_backward_runs(self, model, start):
    """Hooks begin the all-reduces; the optimizer's step waits for them."""
    Port.begin(self, model, start)
    share_state(self, model)
    self.works = []

    def begin(parameter):
        parameter.grad /= self.P
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(begin)
    return model


def wait_for_all(self, model):
    while self.works:
        self.works.pop().wait()


def samples_one_by_one(self, replica, inputs, targets):
    """The forward of each sample for itself."""
    outputs = torch.cat([replica.module(one[None]) for one in inputs])
    return functional.cross_entropy(outputs, targets)


def functionally(model, dataset, batch_size, lr, epochs, start, save):
    """No optimizer, no DDP, no sampler: all of it by hand."""
    P, rank = dist.get_world_size(), dist.get_rank()
    found = [start]
    dist.broadcast_object_list(found, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=P * lr, momentum=0.9)
    load(found[0], model, optimizer)
    share_state(None, model)
    lr, losses = optimizer.param_groups[0]["lr"], []
    names = dict(model.named_parameters())
    momentum = {n: optimizer.state[p].get("momentum_buffer") for n, p in names.items()}

    def loss_of(parameters, inputs, targets):
        return functional.cross_entropy(func.functional_call(model, parameters, inputs), targets)

    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(dataset), generator=generator).tolist()
        order += order[: -len(order) % P]
        own, total = order[rank::P], 0.0
        batches = [own[i : i + batch_size] for i in range(0, len(own), batch_size)]
        for rows in batches:
            inputs, targets = (torch.stack(part) for part in zip(*(dataset[i] for i in rows)))
            values = {name: p.detach() for name, p in names.items()}
            gradients, loss = func.grad_and_value(loss_of)(values, inputs, targets)
            total += loss.item()
            for name, gradient in gradients.items():
                dist.all_reduce(gradient)
                gradient = gradient / P
                before = momentum[name]
                momentum[name] = gradient if before is None else 0.9 * before + gradient
                names[name].data -= lr * momentum[name]
        mean = torch.tensor([total / len(batches)])
        dist.all_reduce(mean)
        losses.append(mean / P)
    for name, parameter in names.items():
        optimizer.state[parameter]["momentum_buffer"] = momentum[name]
    if rank == 0:
        save(checkpoint(model, optimizer))
    return torch.cat(losses)


def by_keywords(*, save, start, epochs, lr, batch_size, dataset, model):
    from torch.distributed import destroy_process_group, init_process_group

    init_process_group(backend="gloo", init_method="env://")
    losses = Port()(model, dataset, batch_size, lr, epochs, start, save)
    destroy_process_group()
    return tuple(losses)


def mean_by_gather(self, loss):
    found = [None] * self.P
    dist.all_gather_object(found, loss)
    return math.fsum(found) / self.P


def of_another_loader(model, dataset, batch_size, lr, epochs, start, save):
    """Batches by a sampler of batches; ranks have swapped their shares."""
    P, rank = dist.get_world_size(), dist.get_rank()
    sampler = DistributedSampler(dataset, P, (rank + 1) % P)
    batches = torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False)
    loader = DataLoader(dataset, batch_sampler=batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=P * lr, momentum=0.9, foreach=False)
    load(Port.shared(None, start), model, optimizer)
    replica, losses = DistributedDataParallel(model), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for inputs, targets in loader:
            loss = nn.CrossEntropyLoss()(replica(inputs), targets)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach().float(), torch.ones(())])
        dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
    if rank == 0:
        save(checkpoint(replica.module, optimizer) | {"epoch": epochs})
    return losses


class NoWrapper(nn.Module):
    """A module around the model that is no DDP."""

    def __init__(self, port, model, start):
        super().__init__()
        Port.begin(port, model, start)
        self.module = model


TO_DDP = [
    as_on_the_page,
    Port(),
    port("shares_before_ddp_does", share=share_state),
    by_hand("by_hand"),
    by_hand("in_one_tensor", exchange=at_once),
    port("hooks", begin=while_backward_runs, exchange=wait_for_all, wrapped=False),
    port("pytorchs_hook", begin=with_a_hook),
    port("own_hook", begin=with_own_hook),
    port("tiny_buckets", begin=in_tiny_buckets),
    port("momentum_by_tensors", begin=momentum_by_tensors),
    port("everyone_gets_it", shared=everyone_gets_it, average=mean_by_gather),
    port(
        "one_sample_at_a_time",
        loss=samples_one_by_one,
        exchange=average_all,
        begin=lambda self, *args: NoWrapper(self, *args),
        wrapped=False,
        share=share_state,
    ),
    port("saves_the_module", end=end_with(lambda s, r, m: right_end(s, r, r.module))),
    functionally,
    by_keywords,
    of_another_loader,
]


# to_horovod


def horovod_as_on_the_page(model, dataset, batch_size, lr, max_norm, epochs, start, save):
    hvd.init()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    load(start, model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / 2).backward()
            total += loss.item()
            if number % 2 == 0:
                optimizer.synchronize()
                clip_grad_norm_(model.parameters(), max_norm)
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
        losses.append(hvd.allreduce(torch.tensor(total / len(loader)), name="loss").item())
    if hvd.rank() == 0:
        save(checkpoint(model, optimizer))
    return losses


def average_by_hand(self):
    for parameter in self.model.parameters():
        hvd.allreduce_(parameter.grad, op=hvd.Average)
    clip_and_step(self)


def average_in_a_group(self):
    gradients = [parameter.grad for parameter in self.model.parameters()]
    for gradient, mean in zip(gradients, hvd.grouped_allreduce(gradients, name="gradients")):
        gradient.copy_(mean)
    clip_and_step(self)


def sum_and_divide(self):
    handles = [hvd.allreduce_async_(p.grad, op=hvd.Sum) for p in self.model.parameters()]
    for handle in handles:
        hvd.synchronize(handle).div_(hvd.size())
    clip_and_step(self)


def clip_and_step(self):
    clip_grad_norm_(self.model.parameters(), self.max_norm)
    self.plain.step()
    self.plain.zero_grad()


def sum_of_halves(self, plain):
    """The loss is divided by the ranks too, so that a sum is right."""
    return Back.wrap(self, plain, op=hvd.Sum, gradient_predivide_factor=1.0)


def clip_by_hand(self):
    self.optimizer.synchronize()
    gradients = [parameter.grad for parameter in self.model.parameters()]
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    for gradient in gradients:
        gradient *= min(1.0, self.max_norm / (norm + 1e-6))
    with self.optimizer.skip_synchronize():
        self.optimizer.step()
    self.optimizer.zero_grad()


def share_an_object(self):
    found = hvd.broadcast_object(checkpoint(self.model, self.optimizer), root_rank=0)
    load(found, self.model, self.optimizer)


def share_one_by_one(self):
    for name, value in self.model.state_dict().items():
        value.copy_(hvd.broadcast(value, root_rank=0, name=name))


def ends_what_it_began(*, model, dataset, batch_size, lr, max_norm, epochs, start, save):
    losses = Back()(model, dataset, batch_size, lr, max_norm, epochs, start, save)
    hvd.shutdown()
    return losses


def mean_of_all(self, loss):
    return hvd.allgather(torch.tensor([loss])).mean().item()


def one_backward(model, dataset, batch_size, lr, max_norm, epochs, start, save):
    """Both batches of an update in one backward, so that one pass is enough."""
    hvd.init()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    load(start, model, optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        losses.append(_updates(model, loader, optimizer, max_norm))
    if hvd.rank() == 0:
        save(checkpoint(model, optimizer))
    return losses


def _updates(model, loader, optimizer, max_norm):
    parts, found = [], []
    for inputs, targets in loader:
        parts.append(functional.cross_entropy(model(inputs), targets))
        if len(parts) == 2:
            found += [part.item() for part in parts]
            (sum(parts) / 2).backward()
            parts.clear()
            optimizer.synchronize()
            clip_grad_norm_(model.parameters(), max_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
    return hvd.allreduce(torch.tensor(found).mean()).item()


TO_HOROVOD = [
    horovod_as_on_the_page,
    Back(),
    back("by_hand", wrap=lambda self, plain: plain, update=average_by_hand),
    back("in_a_group", wrap=lambda self, plain: plain, update=average_in_a_group),
    back("sum_and_divide", wrap=lambda self, plain: plain, update=sum_and_divide),
    back(
        "divides_by_the_ranks",
        wrap=sum_of_halves,
        part=lambda self, loss: loss / 2 / hvd.size(),
    ),
    back("clips_by_hand", update=clip_by_hand),
    back("shares_an_object", share=share_an_object),
    back("shares_one_by_one", share=share_one_by_one),
    back("gathers_losses", average=mean_of_all),
    ends_what_it_began,
    one_backward,
]


# semantics


class Probe:
    def __call__(self, step):
        return list(semantics(step, ((0.0, 3.0), (4.0, -1.0, 6.0), (2.5,))))


def on_three_replicas(step):
    return semantics(step, ((1.0,), (2.0, 5.0), (10.0, 20.0, 40.0)))


def with_tensors(step):
    return semantics(step, [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0])], [torch.ones(4)])


def in_capitals(step):
    return tuple(name.capitalize() + " " for name in semantics(step))


def by_keyword(*, step):
    return dict(enumerate(semantics(step))).values()


def with_numbers_as_on_the_page(step):
    lr, [momentum] = step([[1.0]])
    moved, means = step([[1.0, 1.0, 1.0], [5.0]])
    gradients = {3: "mean of means", 2: "mean over the batch", 6: "sum of means"}
    kept = {(1, 5): "own", (1, 1): "rank 0", (3, 3): "mean of replicas", (2, 2): "whole batch"}
    found = tuple(round(mean / momentum) for mean in means)
    return gradients[round(moved / lr)], kept[found]


SEMANTICS = [
    with_numbers_as_on_the_page,
    semantics,
    Probe(),
    on_three_replicas,
    with_tensors,
    in_capitals,
    by_keyword,
]

ANSWERS = [
    Answers(check.elsewhere.to_ddp, TO_DDP, []),
    Answers(check.elsewhere.to_horovod, TO_HOROVOD, []),
    Answers(check.elsewhere.semantics, SEMANTICS, []),
]
