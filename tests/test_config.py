"""RunConfig refuses settings that cannot run, in messages with the numbers."""

import dataclasses

import pytest
import torch

from labkit.config import RunConfig, parse_devices, parse_link, parse_straggler


def test_defaults_stand_and_are_frozen():
    config = RunConfig()
    assert config.as_dict()["strategy"] == "single"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 0}, "world_size must be an integer from 1 up, got 0"),
        ({"epochs": -1}, "epochs must be"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"train_size": 0}, "train_size must be"),
        ({"world_size": 4, "batch_size": 3}, "batch_size 3 is smaller than world_size 4"),
        ({"lr": 0}, "lr must be a number above 0, got 0"),
        ({"lr": float("inf")}, r"lr must be at most 3.4e\+38, got inf"),
        ({"lr": 1e308}, r"lr must be at most 3.4e\+38, got 1e\+308"),
        ({"lr": "0.1"}, "lr must be a number above 0, got '0.1'"),
        ({"momentum": float("nan")}, "momentum must be a number from 0 up, got nan"),
        ({"momentum": 1}, "momentum must be"),
        ({"weight_decay": -0.1}, "weight_decay must be a number from 0 up, got -0.1"),
        ({"optimizer": "adam", "momentum": 0.1}, "optimizer adam takes no momentum here"),
        ({"optimizer": "m:f", "weight_decay": 0.1}, "optimizer m:f takes no weight_decay here"),
        ({"optimizer": "m:f", "scale_lr": 8}, "scale_lr 8 is for the lr of .*scale it in your"),
        ({"scale_lr": 0}, "scale_lr must be an integer from 1 up, got 0"),
        ({"scale_lr": 1, "lr": 3e38}, r"lr 3e\+38 scaled to batches of 64 must be at most"),
        ({"lr_schedule": 3}, "lr_schedule must be a string, got 3"),
        ({"lr_schedule": "step:3"}, "lr_schedule must be constant, cosine, or step:EPOCHS:FACTOR"),
        ({"warmup_epochs": -1}, "warmup_epochs must be a number from 0 up, got -1"),
        ({"warmup_epochs": 1.5}, "warmup_epochs 1.5 of 1 epoch: .* would never reach lr"),
        ({"dtype": "int8"}, "unknown dtype 'int8': choose one of float32, float64"),
        ({"accumulate": 0}, "accumulate must be an integer from 1 up, got 0"),
        ({"servers": True}, "servers must be an integer from 1 up, got True"),
        ({"max_staleness": -1}, "max_staleness must be an integer from 0 up, got -1"),
        ({"bucket_mb": -1.0}, "bucket_mb must be a number from 0 up, got -1.0"),
        ({"bucket_mb": float("inf")}, "bucket_mb must be at most 1,048,576, got inf"),
        ({"bucket_mb": float("nan")}, "bucket_mb must be a number from 0 up, got nan"),
        ({"seed": -1}, "seed must be an integer from 0 up, got -1"),
        ({"seed": 2**32}, "seed must be at most 4,294,967,295, got 4294967296"),
        ({"amp": "int8"}, "unknown amp 'int8': choose one of bf16, fp16"),
        ({"amp": "bf16", "dtype": "float64"}, "amp bf16 is for dtype float32, got float64"),
        ({"compress": "zip"}, "unknown compress 'zip': choose one of fp16, bf16, topk"),
        ({"straggler": "2:4", "world_size": 2}, "with world_size 2 the ranks are 0 to 1"),
        ({"devices": "cpu,", "world_size": 2}, "separated by commas, got '' in 'cpu,'"),
        ({"devices": "cpu,cpu", "world_size": 3}, "'cpu,cpu' makes 2 devices, but world_"),
        ({"devices": "cpu,cpu", "link": "10ms"}, "with devices one process moves the tensors"),
        ({"builtin": True, "link": "10ms"}, "no emulated link can delay them. Use backend 'lab"),
        ({"link": 0.01}, "link must be a string, got 0.01"),
        ({"devices": "cpu,cpu", "batch_size": 1}, "batch_size 1 is smaller than world_size 2"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        ("sgd", (0.05, 0.9, 0.0)),
        ("adam", (0.001, None, 0.0)),
        ("adamw", (0.001, None, 0.01)),
        ("my_module:make", (None, None, None)),
    ],
)
def test_rates_by_optimizer(optimizer, rates):
    config = RunConfig(optimizer=optimizer)
    assert (config.lr, config.momentum, config.weight_decay) == rates


def test_the_rate_grows_with_the_batch():
    assert RunConfig(lr=0.1, batch_size=96, scale_lr=32).used_lr == pytest.approx(0.3)
    assert RunConfig(lr=0.1, batch_size=16, scale_lr=32).used_lr == pytest.approx(0.05)
    assert RunConfig(lr=0.1, batch_size=96).used_lr == 0.1
    assert RunConfig(optimizer="my_module:make").used_lr is None


def test_a_straggler_is_a_rank_and_a_factor():
    assert parse_straggler("1:4.0", world_size=2) == (1, 4.0)
    assert parse_straggler("0:1", world_size=1) == (0, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "straggler must be RANK:FACTOR, as in 1:4.0, got '1'"),
        ("one:4", "must be RANK:FACTOR"),
        ("1:", "must be RANK:FACTOR"),
        ("-1:2", "the ranks are 0 to 1"),
        ("1:0.5", "the factor must be a number from 1 up, got 0.5"),
        ("1:1e300", r"the factor must be at most 1,000,000, got 1e\+300"),
        ("1:inf", "straggler must be RANK:FACTOR"),
        ("1:nan", "straggler must be RANK:FACTOR"),
        ("\u0661:2", "straggler must be RANK:FACTOR"),
        ("1:1_0", "straggler must be RANK:FACTOR"),
    ],
)
def test_stragglers_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        parse_straggler(text, world_size=2)


@pytest.mark.parametrize(
    ("text", "latency_s", "bytes_per_s"),
    [
        ("10ms,100MB/s", 0.01, 1e8),
        (" 1Gbit/s , 50 us", 50e-6, 125e6),
        ("1.5s", 1.5, float("inf")),
        ("1e3kB/s", 0.0, 1e6),
        ("0s,2MiB/s", 0.0, 2**21),
    ],
)
def test_a_link_is_a_latency_and_a_bandwidth(text, latency_s, bytes_per_s):
    assert parse_link(text) == pytest.approx((latency_s, bytes_per_s))
    assert parse_link(f"{text},2 per host") == pytest.approx((latency_s, bytes_per_s, 2))
    assert parse_link(f" 12 ranks per host , {text}") == (*parse_link(text), 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "link must be LATENCY,BANDWIDTH, as in 10ms,100MB/s, got ''"),
        ("10", "got '10' .units: s, ms"),
        ("10ms,20ms", "got '10ms,20ms'"),
        ("10ms,1MB/s,", "must be LATENCY,BANDWIDTH"),
        ("100Mb/s", "must be LATENCY,BANDWIDTH"),
        ("-1ms", "must be LATENCY,BANDWIDTH"),
        ("1..2ms", "'1..2' is not a number"),
        ("1e9s", "the latency must be at most 1,000,000, got 1000000000.0"),
        ("0MB/s", "the bandwidth must be a number above 0, got 0.0"),
        ("nans", "must be LATENCY,BANDWIDTH"),
        ("1ms,2 hosts", "for emulated hosts, as in 2 per host"),
        ("0 per host", "the ranks per host must be an integer from 1 up, got 0"),
        ("4097 per host", "the ranks per host must be at most 4,096, got 4097"),
    ],
)
def test_links_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(link=text)


def test_options_are_those_that_were_given():
    assert RunConfig().options() == {}
    config = RunConfig(accumulate=1, max_staleness=0, builtin=True, backend="labkit")
    assert config.options() == {"accumulate": 1, "max_staleness": 0, "backend": "labkit"}


@pytest.mark.parametrize(
    "given",
    [
        "cuda:0, cuda:11",
        " cuda:0 ,cuda:11",
        ["cuda:0", "cuda:11"],
        ("cuda:0 ", torch.device("cuda", 11)),
    ],
)
def test_devices_may_be_a_text_or_a_sequence_and_are_kept_as_text(given):
    assert parse_devices(given) == ("cuda:0", "cuda:11")
    assert RunConfig("ddp", devices=given).as_dict()["devices"] == "cuda:0,cuda:11"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("cuda", r"got 'cuda' \(did you mean cuda:0\?\) in 'cuda'"),
        ("cuda:00", r"'cuda:00' \(did you mean cuda:0\?\)"),
        ("cpu,gpu:1", r"'gpu:1' \(did you mean cuda:1\?\) in 'cpu,gpu:1'"),
        ("CUDA:2", r"did you mean cuda:2\?"),
        ("2,3", r"got '2' \(did you mean cuda:2\?\)"),
        ([0, 1], r"got '0' \(did you mean cuda:0\?\) in \[0, 1\]"),
        (3, r"got '3' \(did you mean cuda:3\?\)"),
        ("cuda:-1", "got 'cuda:-1' in"),
        ("cuda:0,,cpu", "got '' in"),
        ("cuda:0 cuda:1", "separated by commas, got 'cuda:0 cuda:1' in"),
        ("cuda:٣", "got 'cuda:٣'"),
        ((), "got '' in"),
        ("", "got '' in"),
    ],
)
def test_other_names_of_devices_are_refused_with_the_closest_right_one(given, told):
    with pytest.raises(ValueError, match=f"must be cpu or cuda:NUMBER, .*{told}"):
        parse_devices(given)
    with pytest.raises(ValueError, match="must be cpu or cuda:NUMBER"):
        RunConfig("ddp", devices=given)


def test_ranks_of_torchrun_get_the_devices_of_their_machine(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert RunConfig("ddp", devices="cpu,cpu", world_size=4).world_size == 4
    with pytest.raises(ValueError, match="makes 4 devices, but world_size is 3"):
        RunConfig("ddp", devices="cpu,cpu", world_size=3)


def test_a_link_goes_with_devices_where_ranks_send_messages():
    RunConfig("ddp", devices="cpu,cpu", link="10ms")
    with pytest.raises(ValueError, match="with devices one process moves the tensors"):
        RunConfig("data_parallel", devices="cpu,cpu", link="10ms")


def test_the_world_size_follows_the_devices():
    assert parse_devices("cuda:0, cuda:11") == ("cuda:0", "cuda:11")
    assert RunConfig(devices="cpu,cpu,cpu").world_size == 3
    assert RunConfig(devices="cpu,cpu", world_size=2).world_size == 2
