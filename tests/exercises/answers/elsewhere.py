"""Wrong answers to ``check.elsewhere``: ports to DDP and to Horovod, and semantics."""

import torch
import torch.distributed as dist
from graded import Answers, ends
from ranks import travel_by_value
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import labkit.horovod as hvd
from workbook import check

travel_by_value(__name__)


def checkpoint(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(found, model, optimizer):
    if found is not None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])


# to_ddp(model, dataset, batch_size, lr, epochs, start, save)


class Port:
    """A port to DDP in pieces, which the wrong ones replace."""

    wrapped = True
    sets_epoch = True

    def __call__(self, model, dataset, batch_size, lr, epochs, start, save):
        self.P, self.rank = dist.get_world_size(), dist.get_rank()
        sampler = self.sampler(dataset)
        loader = DataLoader(dataset, self.size(batch_size), sampler=sampler, **self.loading())
        self.optimizer = self.make_optimizer(model, self.scaled(lr))
        replica = self.begin(model, start)
        losses = []
        for epoch in range(epochs):
            if self.sets_epoch and sampler is not None:
                sampler.set_epoch(epoch)
            total = 0.0
            for inputs, targets in loader:
                loss = self.loss(replica, inputs, targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.exchange(model)
                self.optimizer.step()
                total += loss.item()
            losses.append(self.average(total / len(loader)))
        self.end(replica, model, save)
        return losses

    def sampler(self, dataset):
        return DistributedSampler(dataset)

    def size(self, batch_size):
        return batch_size

    def loading(self):
        return {}

    def make_optimizer(self, model, lr):
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def scaled(self, lr):
        return lr * self.P

    def begin(self, model, start):
        self.load(self.shared(start), model)
        self.share(model)
        return DistributedDataParallel(model) if self.wrapped else model

    def shared(self, start):
        found = [start]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def load(self, found, model):
        load(found, model, self.optimizer)

    def share(self, model):
        pass

    def loss(self, replica, inputs, targets):
        return functional.cross_entropy(replica(inputs), targets)

    def exchange(self, model):
        pass

    def average(self, loss):
        mean = torch.tensor(loss)
        dist.all_reduce(mean)
        return mean.item() / self.P

    def end(self, replica, model, save):
        if self.rank == 0:
            save(checkpoint(model, self.optimizer))


def port(name, **pieces):
    """A function for the check, with some pieces of ``Port`` replaced."""

    def fn(model, dataset, batch_size, lr, epochs, start, save):
        made = type("Changed", (Port,), pieces)()
        return made(model, dataset, batch_size, lr, epochs, start, save)

    fn.__name__ = name
    return fn


def divide_again(self, model):
    for parameter in model.parameters():
        parameter.grad /= self.P


def with_hvd(model, dataset, batch_size, lr, epochs, start, save):
    hvd.init()
    return [0.0] * epochs


# to_horovod(model, dataset, batch_size, lr, max_norm, epochs, start, save)


class Back:
    """A port to Horovod in pieces."""

    def __call__(self, model, dataset, batch_size, lr, max_norm, epochs, start, save):
        self.model, self.max_norm = model, max_norm
        self.init()
        sampler = self.sampler(dataset)
        loader = DataLoader(dataset, batch_size, sampler=sampler)
        self.plain = torch.optim.SGD(model.parameters(), lr=self.scaled(lr), momentum=0.9)
        load(start, model, self.plain)
        self.optimizer = self.wrap(self.plain)
        self.share()
        losses = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            total = 0.0
            for number, (inputs, targets) in enumerate(loader, start=1):
                loss = functional.cross_entropy(self.replica()(inputs), targets)
                self.part(loss).backward()
                total += loss.item()
                if number % 2 == 0:
                    self.update()
            losses.append(self.average(total / len(loader)))
        if hvd.rank() == 0:
            save(checkpoint(model, self.optimizer))
        return losses

    def init(self):
        hvd.init()

    def sampler(self, dataset):
        return DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())

    def scaled(self, lr):
        return lr * hvd.size()

    def wrap(self, optimizer, **options):
        named = self.model.named_parameters()
        options = {"named_parameters": named, "backward_passes_per_step": 2} | options
        return hvd.DistributedOptimizer(optimizer, **options)

    def share(self):
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def replica(self):
        return self.model

    def part(self, loss):
        return loss / 2

    def update(self):
        self.optimizer.synchronize()
        clip_grad_norm_(self.model.parameters(), self.max_norm)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def average(self, loss):
        return hvd.allreduce(torch.tensor(loss), name="loss").item()


def back(name, **pieces):
    """A function for the check, with some pieces of ``Back`` replaced."""

    def fn(model, dataset, batch_size, lr, max_norm, epochs, start, save):
        made = type("Changed", (Back,), pieces)()
        return made(model, dataset, batch_size, lr, max_norm, epochs, start, save)

    fn.__name__ = name
    return fn


# semantics(step)


def semantics(step, shares=((1.0, 1.0, 1.0), (5.0,)), one=((1.0,),)):
    lr, momentum = step(one)[0], step(one)[1][0]
    moved, means = step(shares)
    return of_gradients(moved / lr, shares), of_means([m / momentum for m in means], shares)


def of_gradients(moved, shares):
    means, mean = conventions(shares)
    ways = {"sum of means": sum(means), "mean of means": sum(means) / len(means)}
    return closest(ways | {"mean over the batch": mean}, moved)


def of_means(found, shares):
    means, mean = conventions(shares)
    P = len(means)
    ways = {"own": means, "rank 0": means[:1] * P, "mean of replicas": [sum(means) / P] * P}
    ways |= {"whole batch": [mean] * P}
    gaps = {name: sum(abs(a - b) for a, b in zip(due, found)) for name, due in ways.items()}
    return min(gaps, key=gaps.get)


def closest(ways, found):
    return min(ways, key=lambda name: abs(ways[name] - found))


def conventions(shares):
    everything = [sample for share in shares for sample in share]
    return [sum(share) / len(share) for share in shares], sum(everything) / len(everything)


def shares_of_one_size(step):
    return semantics(step, ((1.0, 2.0), (5.0, 7.0)))


def takes_means_for_the_batch(step):
    gradients, kept = semantics(step)
    return {"mean of means": "mean over the batch"}.get(gradients, gradients), kept


ANSWERS = [
    Answers(
        check.elsewhere.to_ddp,
        [],
        [
            with_hvd,
            port("divides_once_more", exchange=divide_again),
            ends(
                port(
                    "rank_0_asks_alone",
                    average=lambda self, loss: (
                        Port.average(self, loss) if self.rank == 0 else loss
                    ),
                )
            ),
        ],
    ),
    Answers(
        check.elsewhere.to_horovod,
        [],
        [
            back("shares_nothing_at_all", share=lambda self: None),
            back("adds_the_passes_up", part=lambda self, loss: loss),
            ends(
                back(
                    "rank_0_averages",
                    average=lambda self, loss: (
                        Back.average(self, loss) if hvd.rank() == 0 else loss
                    ),
                )
            ),
        ],
    ),
    Answers(
        check.elsewhere.semantics,
        [],
        [shares_of_one_size, takes_means_for_the_batch, lambda step: step([[], [1.0]])],
    ),
]
