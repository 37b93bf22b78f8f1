"""What is built on a backend, under "labkit" and under "gloo": DDP's hooks and options, sharding,
torch.compile, the profiler; callbacks that wait."""

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import plain, stay
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from labkit.engine.errors import PeerLostError

pytestmark = pytest.mark.slow


def on_both(folder, function, world_size=2):
    """Returns the values of all ranks under "labkit", and under "gloo"."""
    found = []
    for backend in ("labkit", "gloo"):
        (place := folder / backend).mkdir()
        outcomes = plain(place, function, world_size, backend, timeout_s=30)
        assert [code for code, _ in outcomes] == [0] * world_size
        assert all(isinstance(outcome, dict) for _, outcome in outcomes), (backend, outcomes)
        found.append([outcome for _, outcome in outcomes])
    return found


def assert_close(found, expected):
    """gloo rounds 16-bit floats after each addition, labkit only at the end."""
    assert found.keys() == expected.keys()
    for name in found:
        relative = 2e-2 if "16" in name else 1e-5
        torch.testing.assert_close(
            found[name], expected[name], rtol=relative, atol=relative / 10, msg=name
        )


# Training


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in ((20, 64), (64, 64), (64, 30), (30, 2))]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def batches(rank, steps=6):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 20, generator=generator) for _ in range(steps)]


def flat(parameters):
    return torch.cat([p.detach().reshape(-1).clone() for p in parameters])


def step_all(model, optimizer, rank, steps=6):
    losses = []
    for x in batches(rank, steps):
        loss = model(x).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses), flat(model.parameters())


def train(rank, hook=None, state=None, **options):
    """The losses, and whether the replicas are equal to the bit."""
    model = DistributedDataParallel(net(), **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    losses, mine = step_all(model, torch.optim.SGD(model.parameters(), lr=0.05), rank)
    replicas = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, mine)
    return losses, mine, torch.tensor([torch.equal(mine, one) for one in replicas])


def power_sgd(**options):
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=3, **options
    )


def reduces_in_a_callback(state, bucket):
    """Gradients in units of their norm over all ranks: a second all-reduce, in a callback."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def scale(future):
        (gradient,) = future.value()
        dist.all_reduce(norm := gradient.norm())
        waited = dist.all_reduce(gradient.max(), async_op=True).get_future().wait()[0]
        return gradient / (norm + waited)

    return future.then(scale)


def with_hooks(rank):
    bf16 = default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    fp16 = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    alone, _ = dist.new_subgroups(1)
    local = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=3)
    hooks = {
        "PowerSGD": (powerSGD_hook.powerSGD_hook, power_sgd()),
        "PowerSGD, cold": (powerSGD_hook.powerSGD_hook, power_sgd(warm_start=False)),
        "PowerSGD, later": (powerSGD_hook.powerSGD_hook, power_sgd(use_error_feedback=False)),
        "PowerSGD in bf16": (bf16, power_sgd()),
        "all-reduce": (default_hooks.allreduce_hook, None),
        "fp16": (default_hooks.fp16_compress_hook, None),
        "bf16": (default_hooks.bf16_compress_hook, None),
        "fp16 around": (fp16, None),
        "local SGD": (post_localSGD_hook.post_localSGD_hook, local),
        "quantized": (quantization_hooks.quantization_pertensor_hook, None),
        "quantized by channel": (quantization_hooks.quantization_perchannel_hook, None),
        "a callback reduces": (reduces_in_a_callback, None),
    }
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        # In PyTorch 2.14 these two index a tensor that has no dimension, on gloo as well.
        del hooks["quantized"], hooks["quantized by channel"]
    return {name: train(rank, hook, state) for name, (hook, state) in hooks.items()}


def test_ddps_hooks_train_as_on_gloo(tmp_path):
    for found, expected in zip(*on_both(tmp_path, with_hooks, 3)):
        assert_close(found, expected)


def waiting(hook):
    """The same hook, which ends before the next bucket's begins: gloo needs that."""

    def waits(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return waits


def with_several_buckets(rank):
    hooks = {"PowerSGD": powerSGD_hook.powerSGD_hook, "a callback reduces": reduces_in_a_callback}
    if dist.get_backend() == "gloo":
        hooks = {name: waiting(hook) for name, hook in hooks.items()}
    found = {}
    for name, hook in hooks.items():
        for number in range(5):
            state = power_sgd() if name == "PowerSGD" else None
            found[f"{name} {number}"] = train(rank, hook, state, bucket_cap_mb=0.001)
    return found


def test_callbacks_of_several_buckets_keep_one_order_on_all_ranks(tmp_path):
    for found, expected in zip(*on_both(tmp_path, with_several_buckets)):
        assert_close(found, expected)


class Words(nn.Module):
    """An embedding whose gradient is sparse; a layer that odd ranks do not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 6, sparse=True)
        self.out, self.seldom = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x, use_all=True):
        x = self.embedding(x).mean(1)
        return self.out(x) + (self.seldom(x) if use_all else 0)


def with_options(rank):
    warnings.simplefilter("ignore")
    found = {
        "static graph": train(rank, static_graph=True, bucket_cap_mb=0.01),
        "views": train(rank, gradient_as_bucket_view=True, bucket_cap_mb=0.01),
        "mixed": train(rank, find_unused_parameters=True),
    }
    words = DistributedDataParallel(Words(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(words.parameters(), lr=0.5)
    for step in range(3):
        x = torch.randint(50, (4, 3), generator=torch.Generator().manual_seed(9 * rank + step))
        words(x, use_all=step == rank).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found["sparse"] = flat(words.parameters())
    model = DistributedDataParallel(net())
    with model.no_sync():
        model(batches(rank)[0]).sum().backward()
    model(batches(rank)[1]).sum().backward()
    found["no_sync"] = flat(p.grad for p in model.parameters())
    uneven = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(uneven.parameters(), lr=0.05)
    with uneven.join():
        found["join"] = step_all(uneven, optimizer, rank, 3 + rank)[1]
    return found


def test_ddps_options_do_what_they_do_on_gloo(tmp_path):
    for found, expected in zip(*on_both(tmp_path, with_options)):
        assert_close(found, expected)


def sharded(rank):
    warnings.simplefilter("ignore")
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found = {}
    model = DistributedDataParallel(net())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    found["ZeRO"] = step_all(model, zero, rank)
    zero.consolidate_state_dict(0)
    found["ZeRO's state"] = torch.tensor(len(zero.state_dict()["state"]) if rank == 0 else 0)
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found["FSDP"] = step_all(model, optimizer, rank)[0]
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(net(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x in batches(rank):
        loss = model(x).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found["fully_shard"] = torch.tensor(losses)
    found["fully_shard's parameters"] = flat(p.full_tensor() for p in model.parameters())
    rows = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    found["DTensor"] = (rows @ rows.redistribute(mesh, [Replicate()]).t()).full_tensor()
    found["DTensor's sum"] = rows.redistribute(mesh, [Shard(1)]).sum().full_tensor()
    return found


def test_sharded_training_gives_what_it_gives_on_gloo(tmp_path):
    for found, expected in zip(*on_both(tmp_path, sharded, 3)):
        assert_close(found, expected)


def compiled(rank):
    model = DistributedDataParallel(net())
    losses = step_all(
        torch.compile(model, backend="aot_eager"),
        torch.optim.SGD(model.parameters(), lr=0.05),
        rank,
        2,
    )

    @torch.compile(backend="aot_eager", fullgraph=True)
    def sums(x):
        dist.all_reduce(x)
        return x * 2

    return {"DDP": losses, "all_reduce": sums(batches(rank)[0])}


def test_compiled_training_gives_what_it_gives_on_gloo(tmp_path):
    for found, expected in zip(*on_both(tmp_path, compiled)):
        assert_close(found, expected)


# Waits end


def calls_what_nobody_answers(rank):
    """Rank 0 calls and awaits an all-reduce in a callback, rank 1 does not."""
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    try:
        future.then(lambda _: rank or dist.all_reduce(torch.ones(1000))).wait()
    except RuntimeError as error:
        return str(error)
    finally:
        stay()


def test_a_callback_that_waits_for_nobody_ends_within_the_timeout(tmp_path):
    (_, text), _ = plain(tmp_path, calls_what_nobody_answers, timeout_s=2)
    assert "PeerLostError: a rank left before direct_all_reduce: nothing from rank 1" in text


def runs_for_ever(rank):
    """The learner's function never returns: the operation and those behind it."""
    import labkit.backend.group

    labkit.backend.use(lambda comm, tensor: time.sleep(3600))
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    texts = []
    for work in works:
        try:
            work.wait()
        except TimeoutError as error:
            texts.append(str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.destroy_process_group()
    texts.append(str(caught[-1].message))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return texts


def test_no_wait_outlives_the_timeout(tmp_path):
    for code, texts in plain(tmp_path, runs_for_ever, timeout_s=2):
        assert code == 0
        assert len(texts) == 3
        for text in texts:
            assert "all_reduce float32 [3]" in text
            assert "still running" in text


def calls_inside(rank):
    import labkit.backend.group

    labkit.backend.use(lambda comm, tensor: dist.all_reduce(torch.ones(2), group=group))
    texts = []
    for async_op in (False, True):
        group = dist.new_group(backend="labkit")
        try:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=async_op)
            work.wait()
        except (ValueError, PeerLostError) as error:  # whichever rank is first
            texts.append(str(error))
    return texts


def test_a_call_inside_an_operation_of_its_group_is_refused(tmp_path):
    for _, texts in plain(tmp_path, calls_inside):
        words = "all_reduce float32 [2] is called inside all_reduce float32 [3] of the same group"
        assert [words in text for text in texts] == [True, True]


def waits_for_who_does_not_come(rank):
    try:
        if rank != 2:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as error:
        return str(error)
    finally:
        stay()


def test_a_monitored_barrier_names_the_missing_rank(tmp_path):
    outcomes = plain(tmp_path, waits_for_who_does_not_come, world_size=4)
    for rank in (0, 1, 3):
        assert "Ranks 2 failed to pass monitoredBarrier: did not call" in outcomes[rank][1]


# Messages


def messages(rank):
    """Receive from any source after all have sent, and a misfit."""
    size, found = dist.get_world_size(), []
    others = [other for other in range(size) if other != rank]
    works = [dist.isend(torch.full((3,), float(rank)), other, tag=1) for other in others]
    for _ in others:
        source = dist.recv(tensor := torch.zeros(3), tag=1)
        found.append(tensor.tolist() == [source] * 3)
    for work in works:
        work.wait()
    # The receiver reads ahead and keeps the message, which then does not fit the receive.
    if rank == 0:
        dist.send(torch.ones(4), 1, tag=2)
        dist.send(torch.ones(1), 1, tag=3)
    if rank == 1:
        dist.recv(torch.zeros(1), 0, tag=3)
        try:
            dist.recv(torch.zeros(5), 0, tag=2)
        except ValueError as error:
            found.append(str(error))
    return found


def test_messages_are_matched_by_source_and_tag(tmp_path):
    outcomes = plain(tmp_path, messages, world_size=3)
    for rank, (code, found) in enumerate(outcomes):
        assert code == 0
        assert found[:2] == [True, True]
        if rank == 1:
            assert "the message from rank 0 is float32 [4]" in found[2]


def waits_for_anybody(rank):
    try:
        if rank == 0:
            dist.recv(torch.zeros(1))
    except ConnectionError as error:
        return str(error)
    finally:
        stay()


def test_who_waits_for_any_source_in_vain_is_told_in_time(tmp_path):
    outcomes = plain(tmp_path, waits_for_anybody, world_size=3, timeout_s=2)
    assert "nothing from rank" in outcomes[0][1]


# The profiler


def profiled(rank):
    x, size = torch.ones(2, 3), dist.get_world_size()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([torch.ones(4) for _ in range(size)], torch.ones(4))
        dist.all_gather_into_tensor(torch.ones(4 * size), torch.ones(4))
        dist.all_reduce_coalesced([torch.ones(4), torch.ones(3)])
        dist.gather(torch.ones(4), [torch.ones(4) for _ in range(size)] if rank == 0 else None)
        dist.scatter(torch.ones(4), [torch.ones(4) for _ in range(size)] if rank == 0 else None)
        dist.all_to_all_single(torch.ones(size), torch.ones(size))
        dist.all_reduce(torch.eye(3).to_sparse())
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(5), 1)
            dist.send(torch.ones(6), 1)
        else:
            dist.recv(torch.ones(5), 0)
            dist.recv(torch.ones(6))
    dist.barrier()
    name = dist.get_backend() + ":"
    events = [event for event in recorded.events() if event.name.startswith(name)]
    return {
        "events": [(e.name.removeprefix(name), e.input_shapes) for e in events],
        "took time": all(e.cpu_time_total > 0 for e in events),
    }


def test_the_profiler_shows_the_operations_that_it_shows_on_gloo_with_their_shapes(tmp_path):
    for found, expected in zip(*on_both(tmp_path, profiled)):
        assert len(found["events"]) == 14
        assert found == expected


def in_inference_mode(rank, size=2):
    outside = torch.ones(3)
    with torch.inference_mode():
        x = torch.ones(3) * (rank + 1)
        dist.all_reduce(x, async_op=True).wait()
        y = torch.ones(2)
        outputs = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(outputs, y, async_op=True).wait()
        dist.all_reduce(outside)
    dist.all_reduce(y)
    return x.tolist(), [o.tolist() for o in outputs], y.tolist(), outside.tolist()


def test_tensors_of_inference_mode_are_worked_on_in_it_and_after_it(tmp_path):
    expected = [3.0] * 3, [[1.0] * 2] * 2, [2.0] * 2, [2.0] * 3
    assert plain(tmp_path, in_inference_mode) == [(0, expected)] * 2
