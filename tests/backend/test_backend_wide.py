"""What is built on a backend, under "labkit" and under "gloo": callbacks, messages, the profiler.

DDP's hooks and options, sharding and torch.compile: tests/clients.
"""

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import plain, stay
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

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


# Training


def train(rank, hook, state=None):
    """The losses and parameters of a model in several buckets; replicas are equal to the bit."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(8, 20, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    replicas = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, own)
    assert all(torch.equal(own, replica) for replica in replicas)
    return [*losses, own]


def reduces_in_a_callback(state, bucket):
    """Gradients in units of their norm over all ranks: a second all-reduce, in a callback."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def scale(future):
        (gradient,) = future.value()
        dist.all_reduce(norm := gradient.norm())
        waited = dist.all_reduce(gradient.max(), async_op=True).get_future().wait()[0]
        return gradient / (norm + waited)

    return future.then(scale)


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
            state = None
            if name == "PowerSGD":
                state = powerSGD_hook.PowerSGDState(
                    None, matrix_approximation_rank=2, start_powerSGD_iter=3
                )
            found[f"{name} {number}"] = train(rank, hook, state)
    return found


def test_callbacks_of_several_buckets_keep_one_order_on_all_ranks(tmp_path):
    found, expected = on_both(tmp_path, with_several_buckets)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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
        work = dist.all_reduce(x, async_op=True)  # and kept, as DDP does
        work.wait()
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
        with record_function("after"):
            pass
    dist.barrier()
    name = dist.get_backend() + ":"
    events = [event for event in recorded.events() if event.name.startswith(name)]
    (after,) = (event for event in recorded.events() if event.name == "after")
    return {
        "events": [(e.name.removeprefix(name), e.input_shapes) for e in events],
        "took time": all(e.cpu_time_total > 0 for e in events),
        "has ended": all(e.time_range.end <= after.time_range.start for e in events),
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
