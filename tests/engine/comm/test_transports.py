"""The contract of every transport: messages, counters, and how a lost peer is reported.

Each test runs on all transports, through a Comm, as everybody uses them. The rules of counting
stand below: nothing that counts asks a formula; a message or segment too few or too many shows.
"""

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from labkit import EmulatedLink, run
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES
from labkit.engine.comm.torch_transport import TorchTransport
from labkit.engine.comm.transport import as_bytes
from labkit.engine.errors import PeerLostError

CPU = torch.device("cpu")
# Two of them are shared memory over an emulated link, and gloo in a group of its own.
TRANSPORTS = ["shared", "gloo", "linked", "group"]
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)


def on(transport: str, function: Callable, world_size: int, *args, **settings) -> list:
    """Returns the values of ``function(comm, *args)`` by rank, with a Comm on that transport."""
    asked = {"group": "gloo", "linked": "shared"}.get(transport, transport)
    settings |= {"world_size": world_size, "device": "cpu", "transport": asked}
    if transport == "linked":
        settings["link"] = EmulatedLink(1e-6, 1e11)
    if transport != "group":
        return run(function, *args, **settings).values
    return run(in_a_group, function, args, **settings).values


def in_a_group(comm, function, args):
    """As the backend does between machines: a process group without a name, and no board."""
    store = dist.PrefixStore("contract", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroupGloo(store, comm.rank, comm.world_size, timedelta(seconds=60))
    # A function that sends nothing would return, and drop the group, while others still connect.
    comm.barrier()
    transport = TorchTransport("gloo", CPU, group)
    return function(Comm(comm.rank, comm.world_size, CPU, transport), *args)


# What arrives


def contents(rank: int, device) -> list[torch.Tensor]:
    """Every dtype, every kind of shape and view, several segments."""
    base = torch.arange(-3.0, 4.0) + rank
    # Without a zero: -0 is what is sent, and adding it to 0 gives 0.
    complexes = torch.complex(base + 0.5, base + 0.5)
    large = torch.arange(3 * NUM_SLOTS * SEGMENT_BYTES + 5).add(rank).to(torch.uint8)
    tensors = [
        *(base.abs().to(dtype) for dtype in DTYPES),
        torch.empty(0),
        torch.empty(0).as_strided((0,), (0,)),
        torch.empty(0, 3, dtype=torch.int16),
        torch.tensor(rank),
        torch.tensor(rank > 0),
        torch.full((2, 3, 4), rank + 1j),
        large[:SEGMENT_BYTES],
        large[: SEGMENT_BYTES + 1],
        large,
        complexes.conj(),
        complexes.conj().imag,
        base[:6].view(2, 3).t(),
        base[::2],
        base.view(1, -1).expand(4, -1),
        base.clone().requires_grad_(),
    ]
    return [tensor.to(device) for tensor in tensors]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    both = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (one, other))
    return torch.equal(*map(as_bytes, both))


def every_operation(comm) -> tuple[list, dict]:
    """Returns the contents that did not arrive, and the counts: messages, bytes, bytes by peer."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    wrong = []
    for mine, due in zip(contents(comm.rank, comm.device), contents(left, comm.device)):
        for name in ("exchange", "send", "recv_add"):
            landing = torch.zeros(due.shape, dtype=due.dtype, device=due.device)
            if name == "exchange":
                comm.exchange(mine, right, landing, left)
            else:
                receive = comm.recv if name == "send" or not can_add(due) else comm.recv_add
                if comm.rank == 0:
                    comm.send(mine, right)
                receive(landing, left)
                if comm.rank != 0:
                    comm.send(mine, right)
            if not same_bits(landing, due):
                wrong.append((name, due.dtype, tuple(due.shape)))
        comm.barrier()
    return wrong, {"all": (comm.messages, comm.bytes_sent), "to": dict(comm.bytes_to)}


def can_add(tensor: torch.Tensor) -> bool:
    return not str(tensor.dtype).startswith("torch.float8")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_dtype_shape_and_size_arrives_by_every_operation_and_is_counted(
    transport, world_size
):
    for rank, (wrong, counts) in enumerate(on(transport, every_operation, world_size)):
        sent = contents(rank, "cpu")
        num_bytes = 3 * sum(tensor.numel() * tensor.element_size() for tensor in sent)
        assert wrong == []
        assert counts["all"] == (3 * len(sent), num_bytes)
        assert counts["to"] == {(rank + 1) % world_size: num_bytes}


def first_come(comm):
    """Rank 0 receives one message from each other rank, in any order; others send their rank."""
    if comm.rank:
        comm.send(torch.full((3,), comm.rank, device=comm.device), 0)
        # Who leaves takes the group's connections along, with what is still under way.
        comm.barrier()
        return comm.messages, comm.bytes_sent
    landing, others = torch.zeros(3, dtype=torch.int64, device=comm.device), [1, 2]
    found = {}
    for _ in others:
        src = comm.recv_any(landing, others)
        found[src] = landing.tolist()
    comm.barrier()
    return found, comm.messages, comm.bytes_sent


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_comes_first_is_received_from_any(transport):
    found, *others = on(transport, first_come, 3)
    assert found == ({1: [1] * 3, 2: [2] * 3}, 0, 0)
    assert others == [(1, 24)] * 2


def leave_while_rank_0(comm):
    """All but rank 0 end; returns the errors that it gets in operations with each of them."""
    comm.barrier()
    if comm.rank > 0:
        os._exit(3)
    mine, theirs = (torch.ones(NUM_SLOTS * SEGMENT_BYTES, device=comm.device) for _ in range(2))
    calls = {
        "send": lambda: [comm.send(mine, 1) for _ in range(50)],
        "recv": lambda: comm.recv(theirs, 2),
        "exchange": lambda: comm.exchange(mine, 3, theirs, 3),
        "barrier": comm.barrier,
    }
    texts = {}
    for operation, call in calls.items():
        try:
            call()
        except PeerLostError as error:
            texts[operation] = str(error)
    return texts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_has_ended_is_a_lost_peer_in_every_operation(transport):
    texts = on(transport, leave_while_rank_0, 4, may_lose=[1, 2, 3])[0]
    assert texts.keys() == {"send", "recv", "exchange", "barrier"}
    # PyTorch's C++ stack.
    assert not any("Exception raised from" in text for text in texts.values())
