"""Horovod's interface: the coordinator, values, the optimizer against one device, scripts.

The cases are those of Horovod's documentation: what it promises of arguments, results and errors.
"""

import pytest
import torch
from hosts import on_hosts
from torch import nn

import labkit.horovod as hvd
from labkit import run
from labkit.costs.traffic import direct_all_reduce_cost
from labkit.horovod.coordinator import Coordinator
from labkit.horovod.negotiator import Handle, fuse

# ---- the coordinator


def says(*names, waits=False):
    return {"new": dict.fromkeys(names, "allreduce sum float32 [2]"), "waits": waits}


def test_nothing_is_decided_before_all_ranks_have_it_and_then_in_one_order():
    coordinator = Coordinator(3)
    assert coordinator.decide([says("a"), says("b"), says("a", "b")]) == {}
    assert list(coordinator.decide([says("b"), says(), says()])) == ["b"]
    assert list(coordinator.decide([says(), says("a"), says()])) == ["a"]


def test_ready_sums_are_fused_up_to_the_limit_by_operation_and_dtype():
    def submitted(tensor, kind="allreduce", option="sum"):
        return Handle(None, "a name", kind, option, tensor, "a line")

    sizes = [
        [one.tensor.numel() for one in group]
        for group in fuse(
            [submitted(torch.empty(count)) for count in (4, 6, 1, 20, 2)], most_bytes=44
        )
    ]
    assert sizes == [[4, 6, 1], [20], [2]]
    one = torch.ones(2)
    mixed = [submitted(one), submitted(one), submitted(one.char()), submitted(one, option="max")]
    mixed += [submitted(one, "allgather", ""), submitted(one, "allgather", "")]
    assert [len(group) for group in fuse(mixed, most_bytes=1000)] == [2, 1, 1, 1, 1]


# ---- values, on real ranks


def mine(*shape, rank=None):
    """This rank's values, the same at every call."""
    generator = torch.Generator().manual_seed(hvd.rank() if rank is None else rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def everyone(*shape):
    return torch.stack([mine(*shape, rank=rank) for rank in range(hvd.size())])


def near(one, other):
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), atol=1e-12)


def reductions():
    size, rank = hvd.size(), hvd.rank()
    values, every = mine(3, 4), everyone(3, 4)
    assert near(hvd.allreduce(values), every.mean(0))
    assert near(hvd.allreduce(values, op=hvd.Sum, name="sum"), every.sum(0))
    assert values.equal(mine(3, 4))
    assert near(hvd.allreduce(values.t(), name="t"), every.mean(0).t())
    assert near(hvd.allreduce(values[0, 0]), every.mean(0)[0, 0])
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    # Averages of integers are rounded towards zero.
    mean = (size - 1) / 2
    whole = hvd.allreduce(torch.tensor([rank, -rank, 7]))
    assert whole.tolist() == [int(mean), int(-mean), 7]
    same = mine(4)[::2]
    assert hvd.allreduce_(same, op=hvd.Sum) is same
    assert near(same, everyone(4).sum(0)[::2])
    parameter = nn.Parameter(mine(2))
    assert near(hvd.allreduce_(parameter, op=hvd.Sum).detach(), everyone(2).sum(0))
    handle = hvd.allreduce_async_(values, name="held")
    assert near(hvd.synchronize(handle), every.mean(0))
    assert near(values, every.mean(0))


def gathers():
    size, rank = hvd.size(), hvd.rank()
    rows = torch.cat([torch.full((r + 1, 2), r) for r in range(size)])
    assert hvd.allgather(torch.full((rank + 1, 2), rank)).equal(rows)
    assert hvd.allgather(torch.full((rank, 2), rank > 0)).shape == (sum(range(size)), 2)
    root = size - 1
    assert hvd.broadcast(torch.tensor(rank), root).item() == root
    flag = torch.tensor([rank == root, False])
    assert hvd.broadcast_(flag, root, name="flag") is flag
    assert flag.tolist() == [True, False]
    settings = {"lr": rank, "t": torch.tensor(rank)}
    found = hvd.broadcast_object(settings, root)
    assert found == {"lr": root, "t": root}
    assert (found is settings) == (rank == root)
    assert hvd.allgather_object("x" * rank, name="texts") == ["x" * r for r in range(size)]
    # Two models, whose parameters have the same names.
    pair = [torch.full((2,), float(rank + number)) for number in range(2)]
    hvd.broadcast_parameters([("weight", values) for values in pair], root)
    assert [values.tolist() for values in pair] == [[root] * 2, [root + 1] * 2]


def refused(words, function, *args, **options):
    with pytest.raises(ValueError, match=words):
        function(*args, **options)
    # The others come through, too, and everything goes on.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def errors():
    one = torch.ones(2)
    refused("'median'", hvd.allreduce, one, op="median")
    refused("float8", hvd.allreduce, one.to(torch.float8_e5m2))
    refused("reshape", hvd.allgather, torch.tensor(1))
    refused("not a rank", hvd.broadcast, one, hvd.size())
    refused("detach", hvd.allreduce, one.requires_grad_())
    one = one.detach()
    # Nothing begins, or ends, in the meantime.
    with hvd.engine().changed:
        hvd.allreduce_async_(one, name="twice")
        with pytest.raises(ValueError, match=r"'allreduce.twice' is under way already, .*\.py"):
            hvd.allreduce_async_(one.clone(), name="twice")
    hvd.allreduce(torch.ones(1))


# ---- training


class Net(nn.Module):
    """Layers that are used, used by some ranks, and frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.some, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x, with_some):
        x = self.frozen(self.first(x).tanh())
        return self.last(self.some(x) if with_some else x)


def net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def batch_of(step, passed, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * passed + rank)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def follows(make, op, passes):
    """Check that the ranks come to where one device does with all their batches."""
    size, rank = hvd.size(), hvd.rank()
    model, alone = net(seed=rank), net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reference = make(alone.parameters())
    plain = make(model.parameters())
    # A scheduler of before, and a hook, stay with it, also after a load_state_dict.
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in (plain, reference)]
    largest = []
    plain.register_step_pre_hook(lambda *_: largest.append(model.last.weight.grad.abs().max()))
    optimizer = hvd.DistributedOptimizer(
        plain, model.named_parameters(), backward_passes_per_step=passes, op=op
    )
    hvd.broadcast_optimizer_state(optimizer, size - 1)
    assert isinstance(optimizer, type(reference))
    for step in range(3):
        optimizer.zero_grad()
        for passed in range(passes):
            loss = model(batch_of(step, passed, rank), with_some=rank == step % size)
            loss.square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        for passed in range(passes):
            losses = [
                alone(batch_of(step, passed, r), with_some=r == step % size).square().mean()
                for r in range(size)
            ]
            (torch.stack(losses).sum() / (size if op == hvd.Average else 1)).backward()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
        assert near(largest.pop(), alone.last.weight.grad.abs().max())
        assert not largest
    for one, other in zip(model.parameters(), alone.parameters()):
        assert (one - other).abs().max() < 1e-10, (make, op, passes)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def trains():
    for op in (hvd.Average, hvd.Sum):
        for passes in (1, 3):
            follows(sgd, op, passes)
    follows(adam, hvd.Average, 1)


def optimizer_rules():
    model = nn.Linear(2, 1).double()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    options = {"named_parameters": model.named_parameters()}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    def backward():
        model(mine(3, 2)).sum().backward()

    backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
        backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    # That pass has changed gradients while they were reduced.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad.count_nonzero() == 0
    backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = model.weight.grad.clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert model.weight.grad.equal(clipped)
    # A scheduler works on it, and what is frozen and free again is reduced.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.bias.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        backward()
        optimizer.step()
        scheduler.step()
        model.bias.requires_grad_(True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def parameters_that_come_later():
    """A layer that was frozen, and one that was not in a group: hooked from the next step on."""
    frozen, added, trained = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(frozen, added, trained).double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    frozen.requires_grad_(False)
    plain = torch.optim.SGD([*frozen.parameters(), *trained.parameters()], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain)

    def step():
        optimizer.zero_grad()
        model(mine(3, 2)).sum().backward()
        optimizer.step()

    step()
    frozen.requires_grad_(True)
    optimizer.add_param_group({"params": added.parameters()})
    step()
    step()
    for name, parameter in model.named_parameters():
        assert near(hvd.broadcast(parameter.detach(), 0, name=f"later.{name}"), parameter.detach())
    optimizer.zero_grad()
    model(mine(3, 2)).sum().backward()
    # Both are reduced while backward runs: a second pass is one too many for each.
    with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
        added.weight.sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
        frozen.weight.sum().backward()
    optimizer.synchronize()


def optimizer_refusals():
    refused("communicator", hvd.init, [0])
    refused("not Linear", hvd.DistributedOptimizer, nn.Linear(2, 1))
    table = nn.Embedding(3, 2, sparse=True)
    hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1))
    with pytest.raises(ValueError, match="sparse=False"):
        table(torch.tensor([1])).sum().backward()
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), 1)
    refused("op=", hvd.DistributedOptimizer, plain, op="max")
    refused("passes", hvd.DistributedOptimizer, plain, backward_passes_per_step=0)
    half = hvd.DistributedOptimizer(
        plain,
        compression=hvd.Compression.fp16,
        gradient_predivide_factor=2.0,
    )
    model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
    half.step()
    refused("closure", half.step, lambda: 0.0)
    refused("already", hvd.DistributedOptimizer, half)
    assert model.weight.grad.tolist() == [[(hvd.size() - 1) / 2] * 2]


def states():
    """The root's options and state, on ranks that have none, or others."""
    kinds = [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
    for root, kind in enumerate(kinds):
        root %= hvd.size()
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 3.0 + hvd.rank()}]
        optimizer = kind(groups, 0.5)
        if hvd.rank() == root:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 3.0 + root]
        theirs = hvd.broadcast_object(optimizer.state_dict(), root)
        assert str(theirs) == str(optimizer.state_dict())


def answers():
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    before = hvd.engine().comm.messages, hvd.engine().comm.bytes_sent
    hvd.allreduce(torch.ones(5000))
    # Small: in one hop.
    sums = direct_all_reduce_cost(5000, 4, hvd.size())
    others = hvd.size() - 1 if hvd.rank() == 0 else 1
    # A length and some JSON to each rank, or to rank 0 alone, once or more.
    talk = hvd.engine().comm.messages - before[0] - sums.messages
    assert talk >= 2 * others or hvd.size() == 1
    assert 0 <= hvd.engine().comm.bytes_sent - before[1] - sums.num_bytes < 800
    hvd.shutdown()
    with pytest.raises(ValueError, match="call hvd"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


PARTS = [reductions, gathers, errors, trains, optimizer_rules, parameters_that_come_later]
PARTS += [optimizer_refusals, states, answers]


def everything(comm, given):
    torch.set_num_threads(1)
    hvd.init(*([comm] if given else []))
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.world_size)
    for part in PARTS:
        part()
    # The rank's own messages do not mix with those of the thread.
    handle = hvd.allreduce_async_(torch.ones(4))
    comm.barrier()
    assert hvd.synchronize(handle).tolist() == [1] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_of_it(world_size):
    run(everything, world_size % 2 == 0, world_size=world_size)


def test_alone_without_a_launcher():
    hvd.init()
    try:
        for part in (reductions, answers):
            part()
    finally:
        hvd.shutdown()


# ---- scripts of torchrun


def script():
    hvd.init()
    torch.set_num_threads(1)
    reductions()
    hvd.shutdown()
    hvd.init()
    found = hvd.allgather_object((hvd.rank(), hvd.local_rank(), hvd.local_size()))
    if hvd.rank() == 0:
        print(found, flush=True)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([2], "[(0, 0, 2), (1, 1, 2)]"),
        ([1, 2], "[(0, 0, 1), (1, 0, 2), (2, 1, 2)]"),
    ],
)
def test_a_script_under_torchrun(sizes, words):
    hosts = on_hosts(script, sizes)
    assert words in hosts[0].text, hosts[0].text
    assert {code for host in hosts for code in host.codes.values()} == {0}, hosts[0].text
