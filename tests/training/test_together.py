"""What torchrun's ranks agree on before a run: here as threads over one store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from labkit.config import RunConfig
from labkit.runtime import rounds
from labkit.training import together, train_run
from labkit.training.resolve import Resolved
from labkit.training.resume import Start

CONFIG = RunConfig("ddp", world_size=3, model="mlp", train_size=64)
READY = Resolved(None, None, "")


@pytest.fixture
def agreed(monkeypatch):
    """What each of three ranks returns or raises: the first two are on one host."""
    store, here = dist.HashStore(), threading.local()
    hosts = ["one", "one", "two"]
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(rounds, "join", lambda _: here.round)
    monkeypatch.setattr(rounds, "code", lambda: here.code)

    def on(rank, config, check, start, code):
        here.round = rounds.Round(rank, 3, hosts, store)
        here.code = code
        try:
            return together.agreed(config, check, lambda _: start, 60)
        except (ValueError, OSError) as error:
            return error

    def on_all(configs=(CONFIG,) * 3, checks=(lambda: READY,) * 3, start=None, codes="aaa"):
        with ThreadPoolExecutor(3) as pool:
            starts = [start] * 3
            return list(pool.map(on, range(3), configs, checks, starts, codes, timeout=240))

    return on_all


def test_equal_ranks_go_on_and_what_belongs_to_a_machine_may_differ(agreed):
    found = agreed([CONFIG, CONFIG, replace(CONFIG, weights="w")])
    assert found == [(READY, Start())] * 3


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lr": 0.1}, "lr 0.05 on rank 0 and 0.1 on rank 2"),
        ({"checkpoint_dir": "x"}, "checkpoint_dir false on rank 0 and true on rank 2"),
    ],
)
def test_a_rank_with_another_command_is_named_on_all(agreed, changed, says):
    found = agreed([CONFIG, CONFIG, replace(CONFIG, **changed)])
    assert len({str(error) for error in found}) == 1
    assert "rank 2 on two is not of the same run as rank 0 on one" in str(found[0])
    assert says in str(found[0])


def test_other_code_is_named(agreed):
    for error in agreed(codes="aab"):
        assert "labkit's code a on rank 0 and b on rank 2" in str(error)


def test_data_that_only_one_machine_lacks(agreed):
    def lacks():
        raise FileNotFoundError("no data set digits: get it by --download")

    for error in agreed(checks=[lambda: READY, lacks, lambda: READY]):
        assert str(error) == "rank 1 on one: no data set digits: get it by --download"


def test_all_ranks_go_on_from_what_rank_0_has_if_they_can_read_it(agreed, monkeypatch, tmp_path):
    monkeypatch.setattr(together, "why_not_whole", lambda path: "gone" * (path.parent.name == "b"))
    folders = [str(tmp_path / name) for name in ("a", "a", "b")]
    configs = [replace(CONFIG, resume=True, checkpoint_dir=folder) for folder in folders]
    start = Start(tmp_path / "a" / "step-00000001", "goes on")
    for error in agreed(configs, start=start):
        assert "rank 2 on two: cannot read what rank 0 has in" in str(error)


@pytest.mark.parametrize("forged", ["", "[]", '{"error": 1}', '{"error": "", "same": 7}', "["])
def test_what_no_rank_has_written_is_refused(forged):
    found = rounds.Round(0, 1, ["one"], None)
    found.exchange = lambda *_: [forged]
    with pytest.raises(ConnectionError, match="which labkit does not write"):
        together.exchange(found, {"error": "", "same": {}}, "a check")


def test_the_world_size_that_is_left_out_is_that_of_torchrun(monkeypatch):
    configs = []
    monkeypatch.setattr(train_run, "train_run", lambda config, **_: configs.append(config))
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    train_run.train_with("ddp")
    train_run.train_with("ddp", world_size=2)
    assert [config.world_size for config in configs] == [3, 2]
