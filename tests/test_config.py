"""RunConfig refuses settings that cannot run, in messages with the numbers."""

import pytest
import torch

from labkit.config import RunConfig, parse_devices, parse_link, parse_straggler


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 0}, "world_size must be an integer from 1 up, got 0"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"world_size": 4, "batch_size": 3}, "batch_size 3 is smaller than world_size 4"),
        ({"lr": 0}, "lr must be a number above 0, got 0"),
        ({"lr": float("inf")}, "lr must be at most .* got inf"),
        ({"lr": "0.1"}, "lr must be a number above 0, got '0.1'"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number from 0 up, got nan"),
        ({"optimizer": "m:f", "weight_decay": 0.1}, "optimizer m:f takes no weight_decay here"),
        ({"lr_schedule": 3}, "lr_schedule must be a text that is not empty, got 3"),
        ({"lr_schedule": "step:3"}, "lr_schedule must be constant, cosine, or step:EPOCHS:FACTOR"),
        ({"warmup_epochs": 1.5}, "warmup_epochs 1.5 of 1 epoch: .* would never reach lr"),
        ({"dtype": "int8"}, "unknown dtype 'int8': choose one of float32, float64"),
        ({"servers": True}, "servers must be an integer from 1 up, got True"),
        ({"builtin": 1}, "builtin must be True or False, got 1"),
        ({"max_staleness": -1}, "max_staleness must be an integer from 0 up, got -1"),
        ({"bucket_mb": float("inf")}, "bucket_mb must be at most 1,048,576, got inf"),
        ({"seed": 2**32}, "seed must be at most 4,294,967,295, got 4294967296"),
        ({"amp": "bf16", "dtype": "float64"}, "amp bf16 is for dtype float32, got float64"),
        ({"augment": "crop,flop"}, "unknown augment 'flop' .did you mean 'flip'"),
        ({"freeze": "a,,b"}, "freeze must be names with commas"),
        ({"weights": ""}, "weights must be a text that is not empty"),
        ({"straggler": "2:4", "world_size": 2}, "with world_size 2 the ranks are 0 to 1"),
        ({"devices": "cpu,", "world_size": 2}, "separated by commas, got '' in 'cpu,'"),
        ({"devices": "cpu,cpu", "world_size": 3}, "'cpu,cpu' makes 2 devices, but world_"),
        ({"devices": "cpu,cpu", "link": "10ms"}, "with devices one process moves the tensors"),
        ({"builtin": True, "link": "10ms"}, "no emulated link can delay them. Use backend 'lab"),
        ({"backend": "gloo"}, "backend 'gloo' is for PyTorch's counterpart"),
        ({"resume": True}, "resume needs checkpoint_dir"),
        ({"devices": "cpu,cpu", "batch_size": 1}, "batch_size 1 is smaller than world_size 2"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [("sgd", (0.05, 0.0)), ("adamw", (0.001, 0.01)), ("my_module:make", (None, None))],
)
def test_rates_by_optimizer(optimizer, rates):
    config = RunConfig(optimizer=optimizer)
    assert (config.lr, config.weight_decay) == rates


@pytest.mark.parametrize("text", ["1", "one:4", "1:", "-1:2", "1:0.5", "1:inf", "\u0661:2"])
def test_a_straggler_is_a_rank_and_a_factor(text):
    assert parse_straggler("1:4.0", world_size=2) == (1, 4.0)
    with pytest.raises(ValueError, match=r"straggler must be RANK:FACTOR, as in 1:4\.0, got"):
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
    assert parse_link(f" 12 ranks per host , {text}") == (*parse_link(text), 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10", "must be LATENCY,BANDWIDTH, as in 10ms,100MB/s, got '10' .units: s, ms"),
        ("10ms,20ms", "got '10ms,20ms'"),
        ("100Mb/s", "must be LATENCY,BANDWIDTH"),
        ("-1ms", "must be LATENCY,BANDWIDTH"),
        ("1..2ms", "could not convert string to float: '1..2'"),
        ("1e9s", "the latency must be at most 1,000,000, got 1000000000.0"),
        ("0MB/s", "the bandwidth must be a number above 0, got 0.0"),
        ("4097 per host", "the ranks per host must be at most 4,096, got 4097"),
    ],
)
def test_links_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(link=text)


def test_options_are_those_that_were_given():
    assert RunConfig(amp="tf32").options() == {}
    assert RunConfig(amp="tf32").tf32
    config = RunConfig(accumulate=1, max_staleness=0, builtin=True, backend="labkit")
    assert config.options() == {"accumulate": 1, "max_staleness": 0, "backend": "labkit"}


@pytest.mark.parametrize("given", [" cuda:0 ,cuda:11", ("cuda:0 ", torch.device("cuda", 11))])
def test_devices_may_be_a_text_or_a_sequence_and_are_kept_as_text(given):
    assert parse_devices(given) == ("cuda:0", "cuda:11")
    assert RunConfig("ddp", devices=given).as_dict()["devices"] == "cuda:0,cuda:11"


@pytest.mark.parametrize("given", ["cuda", "cuda:00", "cpu,gpu:1", [0, 1], 3, "cuda:\u0663", ()])
def test_other_names_of_devices_are_refused(given):
    with pytest.raises(ValueError, match="must be cpu or cuda:NUMBER"):
        RunConfig("ddp", devices=given)


def test_ranks_of_torchrun_get_the_devices_of_their_machine(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert RunConfig("ddp", devices="cpu,cpu", world_size=4).world_size == 4
    with pytest.raises(ValueError, match="makes 4 devices, but world_size is 3"):
        RunConfig("ddp", devices="cpu,cpu", world_size=3)


def test_the_world_size_follows_devices_and_stages():
    assert RunConfig(devices="cpu,cpu,cpu").world_size == 3
    assert RunConfig("pipeline", split_points="3,5").world_size == 3
