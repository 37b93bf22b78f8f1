"""RunConfig refuses settings that cannot run, in messages with the numbers."""

import pytest
import torch

from labkit.training.config import RunConfig, parse_devices, parse_link, parse_straggler


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 4, "batch_size": 3}, "batch_size 3 is smaller than world_size 4"),
        ({"lr": float("inf")}, "lr must be at most .* got inf"),
        ({"optimizer": "m:f", "weight_decay": 0.1}, "optimizer m:f takes no lr and no weight_de"),
        ({"lr_schedule": "step:3"}, "lr_schedule must be constant, cosine, or step:EPOCHS:FACTOR"),
        ({"dtype": "int8"}, "unknown dtype 'int8': choose one of float32, float64"),
        ({"devices": "cpu,cpu", "world_size": 3}, "world_size 3 is 3 ranks, devices cpu,cpu is 2"),
        ({"devices": "cpu,cpu", "link": "10ms"}, "do not pass through labkit's messages"),
        ({"builtin": True, "link": "10ms"}, "do not pass through labkit's messages"),
        ({"resume": True}, "resume and checkpoint_every need checkpoint_dir"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"optimizer": "sgd"}, (0.05, 0.0)),
        ({"optimizer": "adamw"}, (0.001, 0.01)),
        ({"optimizer": "my_module:make"}, (None, None)),
        ({"model": "vgg16"}, (0.005, 0.0)),
    ],
)
def test_rates_by_optimizer_and_model(settings, rates):
    config = RunConfig(**settings)
    assert (config.lr, config.weight_decay) == rates


@pytest.mark.parametrize("text", ["1", "one:4", "1:", "-1:2", "1:0.5", "1:inf", "\u0661:2"])
def test_a_straggler_is_a_rank_and_a_factor(text):
    assert parse_straggler("1:4.0", world_size=2) == (1, 4.0)
    with pytest.raises(ValueError, match=r"straggler must be RANK:FACTOR, as in 1:4\.0, got"):
        parse_straggler(text, world_size=2)


def test_a_link_is_a_latency_a_bandwidth_and_ranks_per_host():
    assert parse_link("10ms,100MB/s") == {"latency_s": 0.01, "bandwidth_bytes_per_s": 1e8}
    found = {"latency_s": 2e-5, "bandwidth_bytes_per_s": 1.25e8, "ranks_per_host": 2}
    assert parse_link("2e-05s, 1 Gbit/s ,2 per host") == pytest.approx(found)
    for text in ("", "10", "100Mb/s", "-1ms", "1..2ms", "10ms,"):
        with pytest.raises(ValueError, match="link must be LATENCY,BANDWIDTH, as in 10ms,100MB/s"):
            parse_link(text)


@pytest.mark.parametrize("given", [" cuda:0 ,cuda:11", ("cuda:0 ", torch.device("cuda", 11))])
def test_devices_may_be_a_text_or_a_sequence_and_are_kept_as_text(given):
    assert parse_devices(given) == ("cuda:0", "cuda:11")
    assert parse_devices(RunConfig("ddp", devices=given).devices) == ("cuda:0", "cuda:11")


@pytest.mark.parametrize("given", ["cuda", "cuda:00", "cpu,gpu:1", [0, 1], 3, "cuda:\u0663"])
def test_other_names_of_devices_are_refused(given):
    with pytest.raises(ValueError, match="must be cpu or cuda:NUMBER"):
        RunConfig("ddp", devices=given)


def test_the_world_size_follows_devices_of_each_machine_and_stages(monkeypatch):
    assert RunConfig("pipeline", split_points="3,5").world_size == 3
    assert RunConfig(devices="cpu,cpu,cpu").world_size == 3
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert RunConfig("ddp", devices="cpu,cpu", world_size=4).world_size == 4
    with pytest.raises(ValueError, match="devices cpu,cpu is 4 ranks"):
        RunConfig("ddp", devices="cpu,cpu", world_size=3)
