"""PyTorch's own clients of a backend, a function each: ``client(backend)`` returns numbers."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    post_localSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn import functional as differentiable
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Shard, distribute_tensor, parallel
from torch.nn.parallel import DistributedDataParallel
from training import batches, network, train


def ddp(backend):
    dist.init_process_group(backend)
    model = DistributedDataParallel(network())
    with model.no_sync():
        model(batches()[0][0]).sum().backward()
    return train(model)


class Words(nn.Module):
    """An embedding whose gradient is sparse; a layer that some ranks do not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 6, sparse=True)
        self.out, self.seldom = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, words):
        embedded = self.embedding(words).mean(1)
        return self.out(embedded) + (self.seldom(embedded) if dist.get_rank() else 0)


def ddp_options(backend):
    dist.init_process_group(backend)
    options = {"bucket_cap_mb": 0.0003}
    results = []
    for option in ("static_graph", "gradient_as_bucket_view", "find_unused_parameters"):
        results += train(DistributedDataParallel(network(), **options, **{option: True}))
    model = DistributedDataParallel(Words(), find_unused_parameters=True)
    words = [(samples.abs().mul(20).long() % 50, labels) for samples, labels in batches()]
    return results + train(model, data=words)


def compiled(backend):
    dist.init_process_group(backend)
    model = DistributedDataParallel(network())
    results = train(torch.compile(model, backend="aot_eager"))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def doubled_sum(values):
        dist.all_reduce(values)
        return values * 2

    return [*results, doubled_sum(batches()[0][0])]


def ddp_hooks(backend):
    dist.init_process_group(backend)
    results = []
    # The others quantize for GPUs, or need a state of their own.
    for name in ("ALLREDUCE", "FP16_COMPRESS", "BF16_COMPRESS", "POWER_SGD", "BATCHED_POWER_SGD"):
        model = DistributedDataParallel(network())
        register_ddp_comm_hook(DDPCommHookType[name], model, dist.group.WORLD)
        results += train(model)
    return results


# bfloat16 holds 8 bits, and the order of a sum is a backend's own.
ddp_hooks.rounding = 2**-7


def join(backend):
    """Ranks with different numbers of batches."""
    dist.init_process_group(backend)
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        return train(model, optimizer, batches(2 + dist.get_rank()))


def zero_redundancy(backend):
    dist.init_process_group(backend)
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    return train(model, optimizer)


def post_local_sgd(backend):
    dist.init_process_group(backend)
    model = DistributedDataParallel(network())
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_group([dist.get_rank()]), 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, PostLocalSGDOptimizer(optimizer, averager), batches(6))


def fsdp1(backend):
    dist.init_process_group(backend)
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    return train(model)


def fsdp2(backend):
    dist.init_process_group(backend)
    model = network()
    for layer in model:
        fully_shard(layer)
    return train(fully_shard(model))


def tensor_parallel(backend):
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    return train(parallel.parallelize_module(network(), mesh, plan), data=batches_of_all())


def sequence_parallel(backend):
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
        "2": parallel.RowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallel.parallelize_module(network(), mesh, plan)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    data = [(samples[share], labels[share]) for samples, labels in batches_of_all()]
    return train(model, data=data)


def batches_of_all():
    """The batches of rank 0, on every rank."""
    found = [batches()]
    dist.broadcast_object_list(found)
    return found[0]


def dtensor(backend):
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rows = distribute_tensor(torch.arange(42.0).view(7, 6), mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    whole = (rows @ columns.T).full_tensor()
    return [columns.to_local(), whole, rows.sum().full_tensor()]


def pipelining(backend):
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    names = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
    for name in (*names, "ZBVZeroBubble", "DualPipeV"):
        schedule_class = getattr(schedules, f"Schedule{name}")
        numbers = [rank, rank + size]
        if name in ("1F1B", "GPipe"):
            numbers = [rank]
        elif name in ("ZBVZeroBubble", "DualPipeV"):
            numbers = [rank, 2 * size - 1 - rank]
        count = size * len(numbers)
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(count)]
        stages = [PipelineStage(layers[n], n, count, torch.device("cpu")) for n in numbers]
        stages = stages if len(stages) > 1 else stages[0]
        schedule = schedule_class(stages, 2 * size, loss_fn=nn.functional.mse_loss)
        samples = torch.ones(12 * size, 8)
        losses = []
        schedule.step(*[samples][: rank == 0], target=samples, losses=losses)
        results += losses + [layers[n].weight.grad for n in numbers]
    return results


def checkpoint(backend):
    """A sharded model's checkpoint, saved by all ranks and loaded with another layout."""
    dist.init_process_group(backend)
    model = fully_shard(network())
    results = train(model)
    folder = [None]
    folder = "checkpoint"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    whole = network().state_dict()
    dcp.load({"model": whole}, checkpoint_id=folder)
    return results + list(whole.values())


def functional_collectives(backend):
    dist.init_process_group(backend)
    group, size = dist.group.WORLD, dist.get_world_size()
    values = torch.arange(4.0 * size).view(2 * size, 2) + dist.get_rank()
    parts = [1 + (dist.get_rank() + other) % 2 for other in range(size)]
    results = [
        functional.all_reduce(values, "avg", group),
        functional.all_gather_tensor(values, 1, group),
        functional.reduce_scatter_tensor(values, "sum", 0, group),
        functional.all_to_all_single(values[: sum(parts)], parts, parts, group),
        functional.broadcast(values, 1, group),
        *functional.all_reduce_coalesced([values, values + 1], "max", group),
    ]
    return [result + 0 for result in results]


def differentiable_collectives(backend):
    """Gradients through ``torch.distributed.nn``."""
    dist.init_process_group(backend)
    size = dist.get_world_size()
    values = (torch.arange(4.0 * size).view(2 * size, 2) + dist.get_rank()).requires_grad_()
    parts = list(values.chunk(size))
    results = [
        differentiable.all_reduce(values),
        torch.cat(differentiable.all_gather(values)),
        differentiable.reduce_scatter(torch.empty(2, 2), parts),
        torch.cat(differentiable.all_to_all([torch.empty(2, 2) for _ in parts], parts)),
        differentiable.broadcast(values, 1),
        differentiable.scatter(parts, 0),
    ]
    sum(result.square().sum() for result in results).backward()
    return [values.grad, *(result.detach() for result in results)]
