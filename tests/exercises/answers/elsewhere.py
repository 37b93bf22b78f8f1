"""Wrong answers to ``check.elsewhere``: ports to DDP and to Horovod, and semantics."""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from graded import Answers
from ranks import travel_by_value
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import labkit.horovod as hvd
from workbook import check
from workbook.exercises.programs import with_horovod

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


def by_hand(name, **pieces):
    """Without DDP: the state is broadcast and gradients are averaged by hand."""
    return port(name, **{"wrapped": False, "share": share_state, "exchange": average_all} | pieces)


def share_state(self, model):
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)


def average_all(self, model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.P


def share_parameters(self, model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def share_buffers(self, model):
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def only_sum(self, model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def divide_again(self, model):
    for parameter in model.parameters():
        parameter.grad /= self.P


def own_first(self, model):
    for parameter in model.parameters():
        found = [torch.empty_like(parameter) for _ in range(self.P)]
        dist.all_gather(found, parameter.grad)
        own = found.pop(self.rank)
        parameter.grad = sum(found, start=own) / self.P


def wrap_first(self, model, start):
    replica = DistributedDataParallel(model)
    load(start, model, self.optimizer)
    return replica


def wrap_first_and_share_momentum(self, model, start):
    replica = wrap_first(self, model, start)
    found = [self.optimizer.state_dict()]
    dist.broadcast_object_list(found, src=0)
    self.optimizer.load_state_dict(found[0])
    return replica


def load_model_alone(self, found, model):
    if found is not None:
        model.load_state_dict(found["model"])


def half_the_momentum(self, found, model):
    load(found, model, self.optimizer)
    for state in self.optimizer.state.values():
        state["momentum_buffer"] /= 2


def mean_of_first(self, loss):
    mean = torch.tensor(loss)
    dist.broadcast(mean, src=0)
    return mean.item()


def sum_of_losses(self, loss):
    return Port.average(self, loss) * self.P


def save_first(self, model, start):
    replica = Port.begin(self, model, start)
    self.before = copy.deepcopy(checkpoint(model, self.optimizer))
    return replica


def end_with(what, who=lambda self: self.rank == 0):
    return lambda self, replica, model, save: who(self) and save(what(self, replica, model))


def right_end(self, replica, model):
    return checkpoint(model, self.optimizer)


def calls_the_script(model, dataset, batch_size, lr, epochs, start, save):
    with_horovod.train(model, dataset, batch_size, lr, epochs, start, save)


def with_hvd(model, dataset, batch_size, lr, epochs, start, save):
    hvd.init()
    return [0.0] * epochs


TO_DDP = [
    (with_hvd, "port.still_horovod", "calls labkit.horovod.operations.init"),
    (calls_the_script, "port.still_horovod", "calls workbook.exercises.programs."),
    (port("reads_everything", sampler=lambda self, dataset: None), "port.reads_all"),
    (
        port(
            "the_global_batch_on_each",
            sampler=lambda self, dataset: None,
            size=lambda self, batch_size: batch_size * self.P,
        ),
        "port.reads_all",
    ),
    (
        port(
            "all_read_rank_0s_share",
            sampler=lambda self, dataset: DistributedSampler(dataset, self.P, 0),
        ),
        "port.same_share",
    ),
    (port("never_tells_the_epoch", sets_epoch=False), "port.set_epoch"),
    (
        port(
            "does_not_shuffle",
            sampler=lambda self, dataset: DistributedSampler(dataset, shuffle=False),
        ),
        "port.in_order",
    ),
    (
        port(
            "drops_in_the_sampler",
            sampler=lambda self, dataset: DistributedSampler(dataset, drop_last=True),
        ),
        "port.dropped",
    ),
    (port("drops_in_the_loader", loading=lambda self: {"drop_last": True}), "port.dropped"),
    (
        port("divides_the_batch", size=lambda self, batch_size: max(1, batch_size // self.P)),
        "port.batch_size",
    ),
    (
        port("another_shuffle", sampler=lambda self, dataset: DistributedSampler(dataset, seed=1)),
        "port.other_samples",
    ),
    (by_hand("shares_nothing", share=lambda self, model: None), "port.nothing_shared"),
    (by_hand("shares_buffers_alone", share=share_buffers), "port.own_weights"),
    (by_hand("shares_parameters_alone", share=share_parameters), "port.own_buffers"),
    (port("wraps_first", begin=wrap_first), "port.shared_early", "port.first_momentum"),
    (port("wraps_before_it_loads", begin=wrap_first_and_share_momentum), "port.shared_early"),
    (port("does_not_scale", scaled=lambda self, lr: lr), "port.lr_unscaled"),
    (port("scales_twice", scaled=lambda self, lr: lr * self.P**2), "port.lr_twice"),
    (by_hand("adds_up", exchange=only_sum), "port.sum", "not port.lr_twice"),
    (
        by_hand("adds_up_and_scales_not", exchange=only_sum, scaled=lambda self, lr: lr),
        "port.sum",
        "port.lr_unscaled",
    ),
    (port("divides_once_more", exchange=divide_again), "port.divided_twice"),
    (
        port("calls_the_model", begin=lambda self, *args: Port.begin(self, *args).module),
        "port.own_gradients",
    ),
    (port("begins_anew", load=lambda *_: None), "port.not_loaded"),
    (port("forgets_the_momentum", load=load_model_alone), "port.no_momentum"),
    (port("momentum_on_rank_0", shared=lambda self, start: start), "port.first_momentum"),
    (port("half_the_momentum", load=half_the_momentum), "port.resumed_differs"),
    (
        port(
            "another_momentum",
            make_optimizer=lambda self, model, lr: torch.optim.SGD(
                model.parameters(), lr, momentum=0.8
            ),
        ),
        "port.differs",
        "port.fresh_differs",
    ),
    (by_hand("own_gradient_first", exchange=own_first), "port.last_bits"),
    (port("its_own_loss", average=lambda self, loss: loss), "port.losses_own"),
    (port("rank_0s_loss", average=mean_of_first), "port.losses_of_first"),
    (port("sums_of_losses", average=sum_of_losses), "port.losses_sum"),
    (port("half_the_loss", average=lambda self, loss: loss / 2), "port.losses"),
    (port("no_losses", average=lambda self, loss: None), "port.losses_kind"),
    (port("all_save", end=end_with(right_end, lambda self: True)), "port.saved_by_all"),
    (
        port("the_last_one_saves", end=end_with(right_end, lambda self: self.rank == self.P - 1)),
        "port.saved_by",
    ),
    (port("nobody_saves", end=lambda *_: None), "port.saved_by", "ranks: none"),
    (
        port("saves_the_model", end=end_with(lambda self, replica, model: model.state_dict())),
        "port.saved_kind",
    ),
    (
        port("saves_the_wrapper", end=end_with(lambda s, r, m: checkpoint(r, s.optimizer))),
        "port.saved_prefix",
    ),
    (
        port("saves_what_it_began_with", begin=save_first, end=end_with(lambda s, *_: s.before)),
        "port.saved_model",
    ),
    (
        port(
            "saves_a_new_optimizer",
            end=end_with(lambda s, r, m: checkpoint(m, s.make_optimizer(m, 0.1))),
        ),
        "port.saved_optimizer",
    ),
    (
        port(
            "rank_0_asks_alone",
            average=lambda self, loss: Port.average(self, loss) if self.rank == 0 else loss,
        ),
        "run.stuck",
    ),
]


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


def clip_then_step(self):
    clip_grad_norm_(self.model.parameters(), self.max_norm)
    self.optimizer.step()
    self.optimizer.zero_grad()


def only_step(self):
    self.optimizer.step()
    self.optimizer.zero_grad()


def step_the_old_one(self):
    clip_grad_norm_(self.model.parameters(), self.max_norm)
    self.plain.step()
    self.plain.zero_grad()


def no_wait_of_a_plain_one(self):
    self.plain.synchronize = lambda: None
    self.plain.skip_synchronize = nullcontext
    Back.update(self)


def share_named(self):
    hvd.broadcast_parameters(self.model.named_parameters(), root_rank=0)


def with_names_of_a_copy(self, optimizer):
    named = copy.deepcopy(self.model).named_parameters()
    return Back.wrap(self, optimizer, named_parameters=named)


TO_HOROVOD = [
    (back("shares_nothing_at_all", share=lambda self: None), "port.nothing_shared"),
    (back("shares_named_parameters", share=share_named), "port.own_buffers"),
    (back("the_old_optimizer", update=step_the_old_one), "port.old_optimizer"),
    (
        back("wraps_nothing", wrap=lambda self, plain: plain, update=no_wait_of_a_plain_one),
        "port.own_gradients",
    ),
    (back("clips_its_own", update=clip_then_step), "port.clipped_before"),
    (back("clips_nothing", update=only_step), "port.not_clipped"),
    (
        back("sums", wrap=lambda self, plain: Back.wrap(self, plain, op=hvd.Sum)),
        "port.sum",
    ),
    (back("lr_of_one_rank", scaled=lambda self, lr: lr), "port.lr_unscaled"),
    (back("adds_the_passes_up", part=lambda self, loss: loss), "port.not_halved"),
    (
        back("never_begins", init=lambda self: None),
        "port.no_init",
    ),
    (back("keeps_its_loss", average=lambda self, loss: loss), "port.losses_own"),
    (
        back(
            "adds_losses_up",
            average=lambda self, loss: hvd.allreduce(torch.tensor(loss), op=hvd.Sum).item(),
        ),
        "port.losses_sum",
    ),
    (back("names_of_another_model", wrap=with_names_of_a_copy), "run.error", "leave out 4"),
    (
        back(
            "one_pass",
            wrap=lambda self, plain: Back.wrap(self, plain, backward_passes_per_step=1),
        ),
        "run.error",
        "was computed more than backward_passes_per_step=1 times",
    ),
    (
        back("asks_for_no_ranks", sampler=lambda self, dataset: DistributedSampler(dataset)),
        "run.error",
        "has no process group in a program that Horovod has started",
    ),
    (
        back("wraps_the_model", replica=lambda self: DistributedDataParallel(self.model)),
        "run.error",
        "has no process group in a program that Horovod has started",
    ),
    (
        back(
            "rank_0_averages",
            average=lambda self, loss: Back.average(self, loss) if hvd.rank() == 0 else loss,
        ),
        "run.stuck",
    ),
]


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


def on_one_replica(step):
    return semantics(step, ((1.0, 2.0, 6.0),))


def always_horovod(step):
    return "mean of means", "own"


def looks_at_the_first(step):
    gradients, kept = semantics(step)
    return gradients, "rank 0" if kept == "own" else kept


def takes_means_for_the_batch(step):
    gradients, kept = semantics(step)
    return {"mean of means": "mean over the batch"}.get(gradients, gradients), kept


def the_other_way_round(step):
    return semantics(step)[::-1]


def in_other_words(step):
    return "average", semantics(step)[1]


def as_if_lr_were_one(step):
    moved, _ = step(((1.0, 1.0, 1.0), (5.0,)))
    return of_gradients(moved, ((1.0, 1.0, 1.0), (5.0,))), semantics(step)[1]


SEMANTICS = [
    (shares_of_one_size, "semantics.equal_shares"),
    (on_one_replica, "semantics.constant"),
    (always_horovod, "semantics.constant"),
    (looks_at_the_first, "semantics.first_replica"),
    (takes_means_for_the_batch, "semantics.equal_shares"),
    (the_other_way_round, "semantics.swapped"),
    (in_other_words, "semantics.words"),
    (as_if_lr_were_one, "answer.wrong"),
    (lambda step: None, "answer.nothing"),
    (lambda step: step([[], [1.0]]), "answer.raised", "needs a share of one sample or more"),
]


ANSWERS = [
    Answers(check.elsewhere.to_ddp, [], TO_DDP),
    Answers(check.elsewhere.to_horovod, [], TO_HOROVOD),
    Answers(check.elsewhere.semantics, [], SEMANTICS),
]
