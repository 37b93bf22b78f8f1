"""Operations that are only queued, as on NCCL: progress, deadlocks, lost peers (FifoTransport)."""

import os
import re
import signal
import threading
import time

import pytest
import torch
from fifo_transport import over_streams  # noqa: F401  (a fixture)
from ranks import travel_by_value

from labkit import DeadlineError, DeadlockError, WorkerError, run
from labkit.comm.board import QUEUED
from labkit.errors import PeerLostError

travel_by_value(__name__)

pytestmark = pytest.mark.usefixtures("over_streams")


class TestTheHostRunsAhead:
    def test_of_everything_that_does_not_use_what_is_queued(self):
        def ahead(comm):
            theirs, other = torch.zeros(4), torch.zeros(4)
            if comm.rank == 0:
                comm.recv(theirs, 1)
                other += 1
                view = theirs[1:]
                ended = comm.session.queue.is_settled
                # Only now may rank 1 send: it waits for this rank's other message.
                comm.send(other, 1)
                return ended, (view + 1).tolist()
            time.sleep(0.1)
            comm.send(torch.ones(4), 0)
            comm.recv(other, 0)
            return other.tolist()

        assert run(ahead, world_size=2).values == [(False, [2.0] * 3), [1.0] * 4]

    def test_a_tensor_may_be_overwritten_once_its_send_is_queued(self):
        def overwrites(comm):
            values = torch.arange(1000.0)
            if comm.rank == 0:
                comm.send(values, 1)
                values.zero_()
                comm.send(values, 1)
                return values.sum().item()
            time.sleep(0.1)
            first, second = torch.empty(1000), torch.empty(1000)
            comm.recv(first, 0)
            comm.recv(second, 0)
            return first.equal(torch.arange(1000.0)), second.sum().item()

        assert run(overwrites, world_size=2).values == [0.0, (True, 0.0)]

    def test_a_rank_far_ahead_waits_before_descriptions_are_overwritten(self):
        def many(comm):
            box = torch.zeros(1)
            if comm.rank == 0:
                for _ in range(2 * QUEUED):
                    comm.send(torch.ones(1), 1)
                return int(comm.session.board.ranks[0]["ended"]) >= QUEUED
            time.sleep(0.2)
            before = int(comm.session.board.counts[0, 0, 1])
            for _ in range(2 * QUEUED):
                comm.recv(box, 0)
            return before, box.item()

        assert run(many, world_size=2).values == [True, (QUEUED, 1.0)]


class TestDeadlocks:
    def test_all_receive_first_is_told_where_the_rank_waits(self):
        def both_receive_first(comm):
            other = torch.empty(2)
            comm.recv(other, 1 - comm.rank)
            comm.send(torch.ones(2), 1 - comm.rank)

        with pytest.raises(DeadlockError) as caught:
            run(both_receive_first, world_size=2)
        text = str(caught.value)
        assert "deadlock: rank 0 -> rank 1 -> rank 0" in text
        assert "rank 0 is in recv, waiting for rank 1 to send float32 [2] (it was queued, " in text
        assert "the rank waits for it in the end of its function), at " in text
        assert text.count("comm.recv(other, 1 - comm.rank)") == 2

    @pytest.mark.parametrize("size", [1, 100_000])
    def test_all_send_first_though_every_message_has_both_its_ends(self, size):
        def all_send_first(comm):
            mine, theirs = torch.ones(size), torch.empty(size)
            comm.send(mine, (comm.rank + 1) % comm.world_size)
            comm.recv(theirs, (comm.rank - 1) % comm.world_size)
            return theirs.sum().item()

        with pytest.raises(DeadlockError) as caught:
            run(all_send_first, world_size=3)
        text = str(caught.value)
        assert "deadlock: rank 0 -> rank 1 -> rank 2 -> rank 0" in text
        assert f"rank 2 is in send, waiting for rank 0 to receive float32 [{size}]" in text
        assert "comm.send(mine, (comm.rank + 1) % comm.world_size)" in text

    @pytest.mark.parametrize(
        ("read", "said"),
        [
            (lambda comm, x: x.item(), "item()"),
            (lambda comm, x: x.numpy(), "numpy()"),
            (lambda comm, x: bool(x), "__bool__()"),
            (lambda comm, x: comm.progress(1, loss=x), "__float__()"),
            (lambda comm, x: comm.barrier(), "barrier"),
        ],
        ids=["item", "numpy", "if", "the loss", "barrier"],
    )
    def test_is_found_where_a_value_is_read(self, read, said):
        def reads(comm, read):
            value = torch.zeros(())
            comm.recv(value, 1 - comm.rank)
            read(comm, value)
            time.sleep(60)

        with pytest.raises(DeadlockError) as caught:
            run(reads, read, world_size=2)
        assert f"the rank waits for it in {said})" in str(caught.value)

    def test_a_rank_that_waits_for_more_than_was_sent(self):
        def one_more(comm):
            box = torch.empty(3)
            for _ in range(3 - comm.rank):
                comm.recv(box, 1) if comm.rank == 0 else comm.send(box, 0)

        with pytest.raises(DeadlockError, match="rank 1 has returned, but rank 0 still waits"):
            run(one_more, world_size=2)

    def test_slow_ranks_are_not_taken_for_stuck_ones(self):
        def slow(comm):
            box = torch.zeros(1)
            for turn in range(4):
                time.sleep(0.15 * ((comm.rank + turn) % 2))
                box += 1
                if comm.rank == 0:
                    comm.send(box, 1)
                    comm.recv(box, 1)
                else:
                    comm.recv(theirs := torch.empty(1), 0)
                    comm.send(theirs + box, 0)
            return comm.session.queue.flush("here")

        assert run(slow, world_size=2).values == [None, None]

    def test_the_deadline_tells_what_was_queued_and_has_no_counterpart(self):
        def uneven(comm):
            if comm.rank == 0:
                for length in (1, 2, 3):
                    comm.send(torch.ones(length), 1)
            else:
                for length in (1, 2):
                    comm.recv(torch.empty(length), 0)
            while True:
                time.sleep(0.01)

        with pytest.raises(DeadlineError) as caught:
            run(uneven, world_size=2, timeout_s=1)
        text = str(caught.value)
        assert "rank 0 was in its own code" in text
        assert re.search(
            r"rank 0 has queued 3 operations, of which 2 have ended; the next is send with rank 1,"
            r" at .*comm\.send\(torch\.ones\(length\), 1\)",
            text,
        )
        assert re.search(
            r"rank 0 has queued 3 sends to rank 1, which has posted 2 receives for them\. The "
            r"first without a counterpart is number 3: float32 \[3\], at .*comm\.send\(",
            text,
        )
        assert "rank 1 has queued" not in text


class TestMismatches:
    def test_of_a_message_far_behind_the_sender_with_both_lines(self):
        def misfit(comm):
            if comm.rank == 0:
                comm.send(torch.ones(3), 1)  # the first
                for _ in range(20):
                    comm.send(torch.ones(5), 1)
            else:
                time.sleep(0.2)
                comm.recv(torch.empty(4), 0)

        with pytest.raises(DeadlockError) as caught:
            run(misfit, world_size=2)
        text = str(caught.value)
        assert "message 1 from rank 0 to rank 1 does not fit" in text
        assert "rank 0 sends float32 [3], at" in text
        assert "comm.send(torch.ones(3), 1)  # the first" in text
        assert "rank 1 receives into float32 [4], at" in text


class TestLostPeers:
    def test_survivors_get_an_error_and_the_queue_is_aborted(self):
        def survives(comm):
            if comm.rank == 1:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            # gloo would notice by itself; NCCL inside a matched transfer does not.
            stream, ended = comm.session.transport, threading.Event()
            stream._inner.recv = lambda *args: ended.wait(30)
            value = torch.zeros(1)
            comm.recv(value, 1)
            try:
                value.item()
            except PeerLostError as error:
                told = str(error), error.rank
            try:
                comm.send(value, 1)
            except PeerLostError as error:
                return *told, stream._aborted, str(error)

        started_s = time.monotonic()
        result = run(survives, world_size=2, may_lose=[1])
        assert time.monotonic() - started_s < 10
        said, rank, aborted, again = result.values[0]
        assert re.match(r"recv with rank 1, queued at .*, broke off: the process of rank 1", said)
        assert (rank, aborted) == (1, True)
        assert again == said
        assert result.lost.keys() == {1}

    def test_who_waits_for_a_survivor_gets_one_too(self):
        def chain(comm):
            if comm.rank == 2:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            ended = threading.Event()
            comm.session.transport._inner.recv = lambda *args: ended.wait(30)
            value = torch.zeros(1)
            # Rank 0 waits for rank 1, which waits for rank 2.
            comm.recv(value, comm.rank + 1)
            try:
                return value.item()
            except PeerLostError as error:
                return str(error)

        first, second, lost = run(chain, world_size=3, may_lose=[2]).values
        assert "rank 1 gave up (the process of rank 2" in first
        assert "the process of rank 2" in second
        assert lost is None

    def test_a_killed_rank_is_named_with_who_waited_for_it(self):
        def killed(comm):
            if comm.rank == 1:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            comm.session.transport._inner.recv = lambda *args: time.sleep(30)
            comm.recv(value := torch.zeros(1), 1)
            return value.item()

        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL") as caught:
            run(killed, world_size=2)
        assert "Rank 0 was waiting for it in recv at" in str(caught.value)
