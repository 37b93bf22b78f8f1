"""What torchrun's ranks agree on before a run: here as threads over one store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from labkit.config import RunConfig
from labkit.runtime import rounds
from labkit.training import resume, together, train_run
from labkit.training.checkpoint import Writer
from labkit.training.own import NOTHING
from labkit.training.resolve import make_strategy, work_of

CONFIG = RunConfig("ddp", world_size=3, model="mlp", train_size=64)


def met(world_size=3, store=None, behind_s=0.0):
    """The rounds of so many ranks, two on the first host and the others on a second one."""
    store = store or dist.HashStore()
    hosts = ["one", "one", *["two"] * world_size][:world_size]
    agents = [f"agent of {host}" for host in hosts]
    clocks = [0.0] * (world_size - 1) + [behind_s]
    return [
        rounds.Round(rank, world_size, hosts, agents, clocks, "here", store)
        for rank in range(world_size)
    ]


def on_all(function, *by_rank):
    """What ``function(round, ...)`` returns or raises on each rank."""

    def called(*arguments):
        try:
            return function(*arguments)
        except (ValueError, OSError) as error:
            return error

    with ThreadPoolExecutor(len(by_rank[0])) as pool:
        return list(pool.map(called, *by_rank, timeout=240))


def checked(configs, check=lambda: "checked"):
    return on_all(
        lambda found, config: together._checked_on_all(found, config, check), met(), configs
    )


def test_equal_ranks_go_on():
    assert checked([CONFIG] * 3) == ["checked"] * 3
    # What belongs to a machine may differ.
    assert checked([CONFIG, CONFIG, replace(CONFIG, weights="w")]) == ["checked"] * 3


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lr": 0.1}, "lr 0.05 on rank 0 and 0.1 on rank 2"),
        ({"batch_size": 32}, "batch_size 64 on rank 0 and 32 on rank 2"),
        ({"checkpoint_dir": "x"}, "checkpoint_dir false on rank 0 and true on rank 2"),
    ],
)
def test_a_rank_with_another_command_is_named_on_all(changed, told):
    found = checked([CONFIG, CONFIG, replace(CONFIG, **changed)])
    assert len({str(error) for error in found}) == 1
    assert "rank 2 on two is not of the same run as rank 0 on one" in str(found[0])
    assert told in str(found[0])


def test_other_code_and_another_torch_are_named(monkeypatch):
    local = threading.local()
    monkeypatch.setattr(rounds, "code", lambda: getattr(local, "code", "a"))
    versions = {"python": "3.11.1", "torch": "2.15.0"}
    other = versions | {"torch": "2.11.0"}
    monkeypatch.setattr(together, "versions", lambda: getattr(local, "versions", versions))

    def check():
        return "checked"

    def rank(found):
        if found.rank == 1:
            local.code, local.versions = "b", other
        try:
            return together._checked_on_all(found, CONFIG, check)
        finally:
            local.__dict__.clear()

    for error in on_all(rank, met()):
        assert "torch 2.15.0 on rank 0 and 2.11.0 on rank 1; labkit's code a on" in str(error)


def test_data_that_only_one_machine_lacks():
    def rank(found):
        def check():
            if found.rank == 1:
                raise FileNotFoundError("no data set digits: get it by --download")

        return together._checked_on_all(found, CONFIG, check)

    first, own, last = on_all(rank, met())
    assert str(first) == str(last) == "rank 1 on one: no data set digits: get it by --download"
    assert isinstance(own, FileNotFoundError)


def test_clocks_that_differ_are_told(capsys):
    together._warn(met(behind_s=12.4)[0], CONFIG)
    assert "the clocks of one and two differ by 12 s" in capsys.readouterr().err
    together._warn(met(behind_s=1.0)[0], CONFIG)
    assert capsys.readouterr().err == ""


def starts(found, configs):
    strategy, work = make_strategy(configs[0]), work_of(configs[0], NOTHING)
    return on_all(
        lambda one, config: together._agreed_start(one, config, NOTHING, strategy, work),
        found,
        configs,
    )


def save(folder, config=CONFIG):
    """A checkpoint of three ranks after one step."""
    work = work_of(config, NOTHING)
    facts = replace(resume.facts_of(config, NOTHING, work, work.make_model()), epoch=1)
    row = {"loss": 0.5, "seconds": 0.1, "test_accuracy": 0.5}
    writers = [Writer(folder, rank, 3) for rank in range(3)]
    for writer in reversed(writers):
        writer.save(replace(facts, rows=[row]), {}, {"draws": False})
    for writer in writers:
        writer.close(failed=False)


def test_all_ranks_go_on_from_what_rank_0_has_if_they_can_read_it(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name)
    (tmp_path / "b" / "step-00000001" / "rank1.safetensors").unlink()
    config = replace(CONFIG, epochs=2)
    shared = [replace(config, resume=True, checkpoint_dir=str(tmp_path / "a"))] * 3
    assert {start.path for start in starts(met(), shared)} == {tmp_path / "a" / "step-00000001"}
    folders = [tmp_path / name for name in ("a", "a", "b")]
    configs = [replace(config, resume=True, checkpoint_dir=str(one)) for one in folders]
    for error in starts(met(), configs):
        assert "rank 2 on two cannot read what rank 0 on one has in" in str(error)
        assert "rank1.safetensors cannot be read" in str(error)


def test_the_world_size_is_that_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"world_size is 3, but torchrun started 2 ranks: leave"):
        together._check_world_size(CONFIG)
    together._check_world_size(replace(CONFIG, world_size=2))


@pytest.mark.parametrize("forged", ["", "[]", '{"error": 1}', '{"error": "", "same": 7}', "["])
def test_what_no_rank_has_written_is_refused(forged):
    with pytest.raises(ConnectionError, match="which labkit does not write"):
        together._read(forged, {"error": str, "same": dict})


def test_the_world_size_that_is_left_out_is_that_of_torchrun(monkeypatch):
    configs = []
    monkeypatch.setattr(train_run, "train_run", lambda config, **_: configs.append(config))
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    train_run.train_with("ddp")
    train_run.train_with("ddp", world_size=2)
    assert [config.world_size for config in configs] == [3, 2]
