"""Horovod's interface: values, gradients, the optimizer against one device, torchrun's scripts.

The cases are those of Horovod's documentation: what it promises of arguments, results and errors.
"""

import os
import re
import signal
import time
import warnings

import pytest
import torch
from hosts import on_hosts
from ranks import travel_by_value
from torch import nn

import labkit.horovod as hvd
from labkit import run
from labkit.costs.traffic import ring_all_reduce_cost

travel_by_value(__name__)


def mine(*shape, dtype=torch.float64, rank=None):
    """This rank's values, the same at every call."""
    generator = torch.Generator().manual_seed(hvd.rank() if rank is None else rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def everyone(*shape):
    return torch.stack([mine(*shape, rank=rank) for rank in range(hvd.size())])


def near(one, other):
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), atol=1e-12)


# ---- values


def reductions():
    size, rank = hvd.size(), hvd.rank()
    values, every = mine(3, 4), everyone(3, 4)
    assert near(hvd.allreduce(values), every.mean(0))
    assert near(hvd.allreduce(values, average=False), every.sum(0))
    assert near(hvd.allreduce(values, op=hvd.Min, name="least"), every.amin(0))
    assert near(hvd.allreduce(values, op=hvd.Max), every.amax(0))
    assert near(hvd.allreduce(values, op=hvd.Product), every.prod(0))
    scaled = hvd.allreduce(values, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert near(scaled, every.sum(0) * 1.5)
    assert near(hvd.allreduce(values.t(), None, "t"), every.mean(0).t())
    assert near(hvd.allreduce(values[0, 0]), every.mean(0)[0, 0])
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    # Averages of integers are rounded towards zero, as are scaled ones.
    whole = torch.tensor([rank, -rank, 7])
    mean = (size - 1) / 2
    assert hvd.allreduce(whole).tolist() == [int(mean), int(-mean), 7]
    assert hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5)[2] == 3 * size
    half = hvd.allreduce(values.float(), compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert torch.allclose(half.double(), every.mean(0), atol=2e-3)
    same = mine(4)[::2]
    assert hvd.allreduce_(same, op=hvd.Sum) is same
    assert near(same, everyone(4).sum(0)[::2])
    parameter = nn.Parameter(mine(2))
    assert near(hvd.allreduce_(parameter, op=hvd.Sum).detach(), everyone(2).sum(0))
    group = [mine(2), mine(3).float(), torch.tensor([rank])]
    found = hvd.grouped_allreduce(group, op=hvd.Sum)
    assert near(found[0], everyone(2).sum(0))
    assert found[1].dtype == torch.float32
    assert found[2].tolist() == [sum(range(size))]
    assert hvd.grouped_allreduce([]) == []
    found = hvd.grouped_allreduce_(group, op=hvd.Sum)
    assert all(one is other for one, other in zip(found, group))
    handle = hvd.allreduce_async(values, name="held")
    assert near(hvd.synchronize(handle), every.mean(0))
    assert hvd.poll(handle)


def gathers():
    size, rank = hvd.size(), hvd.rank()
    rows = torch.cat([torch.full((r + 1, 2), r) for r in range(size)])
    assert hvd.allgather(torch.full((rank + 1, 2), rank)).equal(rows)
    assert hvd.allgather(torch.full((rank, 2), rank > 0)).shape == (sum(range(size)), 2)
    one, other = hvd.grouped_allgather([torch.tensor([rank]), torch.ones(rank + 1)])
    assert one.tolist() == list(range(size))
    assert len(other) == size * (size + 1) // 2
    root = size - 1
    assert hvd.broadcast(torch.tensor(rank), root).item() == root
    flag = torch.tensor([rank == root, False])
    assert hvd.broadcast_(flag, root, name="flag") is flag
    assert flag.tolist() == [True, False]
    sent = torch.arange(size * 2).view(size, 2) + 100 * rank
    came = [torch.arange(2) + 100 * r + 2 * rank for r in range(size)]
    assert hvd.alltoall(sent).equal(torch.stack(came))
    splits = torch.arange(1, size + 1)
    found, came = hvd.alltoall(torch.full((int(splits.sum()),), rank), splits)
    assert came.tolist() == [rank + 1] * size
    assert found.tolist() == [r for r in range(size) for _ in range(rank + 1)]
    # Five rows: the first ranks get one more.
    shares = everyone(5, 2).sum(0).tensor_split(size)
    assert near(hvd.reducescatter(mine(5, 2), op=hvd.Sum), shares[rank])
    assert near(hvd.reducescatter(mine(5, 2)), shares[rank] / size)
    whole, _ = hvd.grouped_reducescatter([torch.full((size,), 3), torch.ones(size)])
    assert whole.tolist() == [3]
    told = hvd.broadcast_object({"lr": rank, "t": torch.tensor(rank)}, root)
    assert told == {"lr": root, "t": root}
    assert hvd.allgather_object("x" * rank, name="texts") == ["x" * r for r in range(size)]


def gradients():
    size, rank = hvd.size(), hvd.rank()

    def of(operation, values, weights):
        values.requires_grad_()
        (operation(values) * weights).sum().backward()
        return values.grad

    weights = torch.stack([mine(4, 2, rank=10 + r) for r in range(size)])
    total = weights.sum(0)
    assert near(of(lambda x: hvd.allreduce(x, op=hvd.Sum), mine(4, 2), weights[rank]), total)
    scaled = of(lambda x: hvd.allreduce(x, prescale_factor=3.0), mine(4, 2), weights[rank])
    assert near(scaled, total * 3 / size)
    last = size - 1
    found = of(lambda x: hvd.broadcast(x, last, "b"), mine(4, 2), weights[rank])
    assert near(found, total / size if rank == last else torch.zeros(4, 2))
    rows, first = 4 * size, 4 * rank
    weights = torch.stack([mine(rows, 2, rank=20 + r) for r in range(size)])
    found = of(hvd.allgather, mine(4, 2), weights[rank])
    assert near(found, weights.mean(0)[first : first + 4])
    # Rank r sends r + 1 rows to each: on the way back it gets as many.
    sent = rank + 1
    weights = torch.full((sum(range(size + 1)), 1), rank + 1.0)
    found = of(hvd.alltoall, mine(sent * size, 1), weights)
    expected = [r + 1.0 for r in range(size) for _ in range(sent)]
    assert found.flatten().tolist() == expected
    weights = torch.full((1, 1), rank + 1.0)
    found = of(lambda x: hvd.reducescatter(x, op=hvd.Sum), mine(size, 1), weights)
    assert found.flatten().tolist() == [size * (r + 1.0) for r in range(size)]
    found = of(hvd.reducescatter, mine(size, 1), weights)
    assert found.flatten().tolist() == [r + 1.0 for r in range(size)]
    one, other = mine(2).requires_grad_(), mine(3).requires_grad_()
    sums = hvd.grouped_allreduce([one, other], op=hvd.Sum)
    (sums[0].sum() + 2 * sums[1].sum()).backward()
    assert (one.grad.tolist(), other.grad.tolist()) == ([size] * 2, [2 * size] * 3)
    with pytest.raises(ValueError, match="has no gradient"):
        of(lambda x: hvd.allreduce(x, op=hvd.Max), mine(2), 1)


def refused(words, function, *args, kind=ValueError, **options):
    with pytest.raises(kind, match=words):
        function(*args, **options)
    # The others come through, too, and everything goes on.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def errors():
    rank, size = hvd.rank(), hvd.size()
    refused("Adasum", hvd.allreduce, torch.ones(2), op=hvd.Adasum)
    refused("not both", hvd.allreduce, torch.ones(2), average=True, op=hvd.Sum)
    refused("'median'", hvd.allreduce, torch.ones(2), op="median")
    refused("finite", hvd.allreduce, torch.ones(2), prescale_factor=float("nan"))
    refused("for tensors, got list", hvd.allreduce, [1.0])
    refused("reshape", hvd.allgather, torch.tensor(1))
    refused("not a rank", hvd.broadcast, torch.ones(1), size)
    with pytest.raises(AttributeError, match="max-restarts"):
        hvd.elastic.run()
    refused("None is not a rank", hvd.broadcast, torch.ones(1), None)
    refused("add up to all rows", hvd.alltoall, torch.ones(3), [1] * (size + 1))
    refused("CPU or CUDA", hvd.allreduce, torch.ones(1, device="meta"))
    refused("state dict", hvd.broadcast_parameters, 3, 0)
    refused("process_set", hvd.allreduce, torch.ones(1), process_set=object())
    if size > 1:
        internal = hvd.HorovodInternalError
        refused("split evenly", hvd.alltoall, torch.ones(size + 1))
        second = int(rank > 0)
        refused("do not agree", hvd.allreduce, torch.ones(2 + second), kind=RuntimeError)
        dtype = [torch.int32, torch.int64][second]
        refused("has allreduce int32", hvd.allreduce, torch.ones(2, dtype=dtype), kind=internal)
        op = [hvd.Max, hvd.Min][second]
        refused(r"\(max\)", hvd.allreduce, torch.ones(2), op=op, kind=internal)
        refused("from rank 0", hvd.broadcast, torch.ones(2), second, kind=internal)
        refused(r"\[2, 3\]", hvd.allgather, torch.ones(2, 3 + second), kind=internal)
    hvd.barrier()


def joins():
    """Ranks with fewer batches: sums go on with zeros, averages divide by all ranks."""
    rank, size = hvd.rank(), hvd.size()
    for batch in range(rank + 1):
        left = size - batch
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [left] * 2
        found = hvd.allreduce(torch.ones(1, dtype=torch.float64), name="loss")
        assert near(found, torch.tensor([left / size]))
    if rank == size - 1 and size > 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0.* called join"):
            hvd.allgather(torch.ones(1), name="not after join")
    assert hvd.join() == size - 1
    # From here on all ranks count what has no name from the same number.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.join() in range(size)


# ---- training


class Net(nn.Module):
    """Layers that are used, used by some ranks, used by none, and frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.some, self.unused, self.frozen = nn.Linear(5, 5), nn.Linear(3, 3), nn.Linear(5, 5)
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


def follows(make, op, passes, steps=3, with_closure=False, **options):
    """Check that the ranks come to where one device does with all their batches."""
    size, rank = hvd.size(), hvd.rank()
    model, alone = net(seed=rank), net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reference = make(alone.parameters())
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), named, backward_passes_per_step=passes, op=op, **options
    )
    assert isinstance(optimizer, type(reference))
    for step in range(steps):

        def backward(step=step):
            optimizer.zero_grad()
            for passed in range(passes):
                loss = model(batch_of(step, passed, rank), with_some=rank == step % size)
                loss.square().mean().backward()
            return loss

        if with_closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        reference.zero_grad()
        for passed in range(passes):
            losses = [
                alone(batch_of(step, passed, r), with_some=r == step % size).square().mean()
                for r in range(size)
            ]
            total = torch.stack(losses).sum() / (size if op == hvd.Average else 1)
            total.backward()
        reference.step()
    assert model.unused.weight.grad is None
    mine, theirs = model.state_dict(), alone.state_dict()
    off = max((mine[name] - theirs[name]).abs().max() for name in mine)
    assert off < 1e-10, (make, op, passes, off)


def sgd(parameters):
    # Weight decay would move parameters without gradients that get zeros instead.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def trains():
    for op in (hvd.Average, hvd.Sum):
        for passes in (1, 3):
            follows(sgd, op, passes)
    follows(adam, hvd.Average, 1, gradient_predivide_factor=float(hvd.size()))
    follows(sgd, hvd.Average, 2, with_closure=True)


def optimizer_rules():
    rank = hvd.rank()
    model = nn.Linear(2, 1).double()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    options = {"named_parameters": model.named_parameters()}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    def backward():
        model(mine(3, 2)).sum().backward()

    backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
        backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        # That pass has changed gradients while they were reduced.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer.zero_grad()
        backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        clipped = model.weight.grad.clone()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert model.weight.grad.equal(clipped)
    optimizer.zero_grad()
    backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
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
    assert all(near(one, mine_of) for one, mine_of in zip(*_all_states(model)))
    for bad, words in (
        ([("a", model.weight)], "leave out 1"),
        ([("a", model.weight), ("a", model.bias)], "several parameters a"),
        ([model.weight, model.bias], "pairs of a name"),
    ):
        refused(words, hvd.DistributedOptimizer, torch.optim.SGD(model.parameters(), 1), bad)
    twice = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), 1))
    twice.set_backward_passes_per_step(2)
    twice.param_groups[0]["params"][0].sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        twice.zero_grad()
    plain = torch.optim.SGD(model.parameters(), 1)
    factor = {"op": hvd.Sum, "gradient_predivide_factor": 2.0}
    refused("predivide", hvd.DistributedOptimizer, plain, **factor)
    for op in ("x", hvd.Adasum, hvd.Min):
        refused("op", hvd.DistributedOptimizer, plain, op=op)
    refused("is not an optimizer", hvd.DistributedOptimizer, 3)
    refused("passes", hvd.DistributedOptimizer, plain, backward_passes_per_step=0)
    small = nn.Linear(2, 1)
    half = hvd.DistributedOptimizer(
        torch.optim.SGD(small.parameters(), 1.0), compression=hvd.Compression.fp16
    )
    small(torch.full((1, 2), float(rank))).sum().backward()
    half.step()
    assert small.weight.grad.tolist() == [[(hvd.size() - 1) / 2] * 2]
    places = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,), check_invariants=True)
    for finish in (hvd.synchronize, lambda handle: handle()):
        total = finish(hvd.sparse_allreduce_async(places, "places", hvd.Sum)).to_dense().tolist()
        each = [float(r < hvd.size()) for r in range(3)]
        assert total == [*each, 2.0 * hvd.size() + (hvd.size() == 4)]
    table = nn.Embedding(4, 2, sparse=True)
    for dense in (False, True):
        sparse = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), 1.0), sparse_as_dense=dense, op=hvd.Sum
        )
        table(torch.tensor([rank % 4, 3])).sum().backward()
        sparse.step()
        assert table.weight.grad.is_sparse == (not dense)
        counts = torch.bincount(
            torch.tensor([r % 4 for r in range(hvd.size())] + [3] * hvd.size())
        )
        assert torch.equal(table.weight.grad.to_dense(), counts[:, None].expand(4, 2))
        for parameter in table.parameters():
            parameter._post_accumulate_grad_hooks.clear()
        table.weight.grad = None


def _all_states(model):
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    return hvd.allgather(flat[None]), flat[None].expand(hvd.size(), -1)


def states():
    """The root's options and state, on ranks that have none, or others."""
    rank = hvd.rank()
    kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
    kinds += [torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam]
    kinds += [torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop]
    for root, kind in enumerate(kinds):
        root %= hvd.size()
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 3.0 + rank}]
        optimizer = kind(groups, 0.5)
        if rank == root:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 3.0 + root]
        theirs = hvd.broadcast_object(optimizer.state_dict(), root)
        assert str(theirs) == str(optimizer.state_dict())
    fresh = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=1.0 + rank)
    hvd.broadcast_optimizer_state(fresh, root_rank=0)
    assert fresh.param_groups[0]["lr"] == 1.0
    lbfgs = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    refused("LBFGS", hvd.broadcast_optimizer_state, lbfgs, 0)
    hvd.broadcast_parameters([torch.ones(2)], 0)


def batch_norm():
    rank, size = hvd.rank(), hvd.size()
    ours, theirs = hvd.SyncBatchNorm(3).double(), nn.BatchNorm2d(3).double()
    every = torch.cat([mine(2, 3, 4, 4, rank=r) for r in range(size)]).requires_grad_()
    part = mine(2, 3, 4, 4).requires_grad_()
    weights = torch.cat([mine(2, 3, 4, 4, rank=50 + r) for r in range(size)])
    right = theirs(every)
    (right * weights).sum().backward()
    found = ours(part)
    (found * weights.chunk(size)[rank]).sum().backward()
    assert near(found, right.chunk(size)[rank])
    assert near(part.grad, every.grad.chunk(size)[rank])
    assert near(ours.running_var, theirs.running_var)


def answers():
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert not any(built() for built in (hvd.mpi_built, hvd.nccl_built, hvd.mpi_threads_supported))
    assert hvd.gloo_built()
    engine = hvd.engine()
    hvd.init()
    assert hvd.engine() is engine
    hvd.init(list(range(hvd.size())))
    if hvd.size() > 1:
        refused("all .* ranks take part", hvd.init, [0])
    before = engine.comm.bytes_sent
    hvd.allreduce(torch.ones(5000))
    sent = engine.comm.bytes_sent - before
    ring = ring_all_reduce_cost(5000, 4, hvd.size(), hvd.rank()).num_bytes
    assert 0 <= sent - ring < 500
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="call hvd"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


PARTS = [reductions, gathers, gradients, errors, joins, trains, optimizer_rules, states]
PARTS += [batch_norm, answers]


def everything(comm, given):
    torch.set_num_threads(1)
    hvd.init(*([comm] if given else []))
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.world_size)
    for part in PARTS:
        part()
    # The rank's own messages do not mix with those of the thread.
    handle = hvd.allreduce_async(torch.ones(4))
    comm.barrier()
    assert hvd.synchronize(handle).tolist() == [1] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_of_it(world_size):
    run(everything, world_size % 2 == 0, world_size=world_size)


def test_alone_without_a_launcher():
    hvd.init()
    try:
        for part in (reductions, joins, answers):
            part()
    finally:
        hvd.shutdown()
    assert not hvd.is_initialized()


def test_run_returns_what_the_ranks_return():
    def train(offset, times=1):
        hvd.init()
        return hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum).item() * times + offset

    assert hvd.run(train, args=(1,), kwargs={"times": 10}, np=2, use_gloo=True) == [11, 11]


# ---- scripts of torchrun


def inside(comm):
    hvd.init()
    return hvd.allreduce(torch.tensor(comm.rank), op=hvd.Sum).item()


def script(how):
    if how == "well":
        size = int(os.environ["WORLD_SIZE"])
        assert run(inside, world_size=size).values == [sum(range(size))] * size
        assert not hvd.is_initialized()
    hvd.init()
    rank = hvd.rank()
    torch.set_num_threads(1)
    reductions()
    hvd.shutdown()
    hvd.init()
    found = hvd.allgather_object((rank, hvd.local_rank(), hvd.cross_rank(), hvd.cross_size()))
    if rank == 0:
        print(found, flush=True)
    if rank == hvd.size() - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise KeyError("of the learner")
        if how == "returns":
            return
    if how != "well":
        began_s = time.monotonic()
        try:
            hvd.allreduce(torch.ones(2), name="waits")
        finally:
            print(f"rank {rank} waited {time.monotonic() - began_s:.1f} s", flush=True)


def faults(sizes, how):
    hosts = on_hosts(script, sizes, how)
    codes = {rank: code for host in hosts for rank, code in host.codes.items()}
    return codes, [host.text for host in hosts]


def test_a_script_under_torchrun():
    codes, (text,) = faults([3], "well")
    assert set(codes.values()) == {0}, text
    assert "[(0, 0, 0, 1), (1, 1, 0, 1), (2, 2, 0, 1)]" in text


def test_a_script_on_two_hosts():
    codes, texts = faults([1, 2], "well")
    assert set(codes.values()) == {0}, texts
    assert "[(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 1, 2)]" in texts[0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", r"rank 1 \(host 1\) cannot be reached"),
        ("raises", "rank 1 raised KeyError: 'of the learner'"),
        ("returns", "rank 1 takes no part any more"),
    ],
)
def test_the_other_ranks_of_a_script_end_with_the_cause(how, words):
    # On the host of a rank that was killed torchrun names the signal, and ends the others at once.
    codes, (text, *_) = faults([1, 1] if how == "killed" else [2], how)
    # Whichever of them ends first, torchrun's agent then asks the other one to end.
    raised = {1, -signal.SIGTERM}
    assert codes[0] in raised, text
    assert codes[1] in {"killed": {-signal.SIGKILL}, "raises": raised, "returns": {0}}[how], text
    assert re.search(words, text)
    assert "rank 0 waited" in text
