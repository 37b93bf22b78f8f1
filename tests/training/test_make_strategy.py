"""What cannot run is refused before any process starts, with the reason and a way out."""

import pytest

from labkit import RunConfig
from labkit.training.resolve import NOTHING, resolve

REFUSED = {
    "dataset=imagenet": "unknown data set 'imagenet': choose one of digits, cifar10",
    "world_size=2": "single trains on one rank, got world_size 2",
    "strategy=ring_all_reduce compress=topk amp=fp16": "choose amp bf16, or compress fp16",
    "strategy=data_parallel devices=cpu,cuda:99": "this machine has .* CUDA GPUs?, counted from",
    "strategy=parameter_server servers=2": "use fewer, or a world_size of 3 or more",
    "strategy=async_parameter_server": "a server and at least one worker, got world_size 1",
    "strategy=async_parameter_server world_size=4 max_staleness=1": "at most 1 cannot be kept",
    "strategy=model_parallel split_points=7": "7 leaves a stage without layers: with 7 layers",
    "strategy=model_parallel world_size=8": "7 layers are no 8 stages: use fewer ranks",
    "strategy=pipeline stages_per_rank=2": "2 with schedule gpipe, which has 1: leave it out",
    "strategy=pipeline schedule=interleaved stages_per_rank=1": "which has 2 or more: 1 is",
    "strategy=pipeline schedule=interleaved world_size=4": "7 layers are no 8 stages: use fewer",
    "strategy=pipeline schedule=interleaved split_points=1,2": "(2|no) split points? .*give 1",
    "strategy=pipeline builtin=True schedule=zero_bubble": "choose one of gpipe, 1f1b",
}
NUMBERS = ("world_size", "servers", "max_staleness", "stages_per_rank")


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_run_is_refused(words):
    settings = dict(word.split("=") for word in words.split())
    settings |= {"builtin": True} if "builtin" in settings else {}
    settings |= {name: int(settings[name]) for name in NUMBERS if name in settings}
    with pytest.raises(ValueError, match=REFUSED[words]):
        resolve(RunConfig(**settings), NOTHING)
