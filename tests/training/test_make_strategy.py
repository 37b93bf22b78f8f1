"""What cannot run is refused before any process starts, with the reason and a way out."""

import pytest

from labkit import RunConfig
from labkit.training.resolve import NOTHING, resolve

TEXT = "model=gpt dataset=text train_size=8"
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
    "strategy=tensor_parallel world_size=2": "model are AvgPool2d, Conv2d, .*use model gpt",
    f"strategy=tensor_parallel {TEXT} world_size=13": "12 heads cannot be cut over 13 ranks",
    f"strategy=tensor_parallel {TEXT} world_size=5 builtin=True": "12 heads into equal parts",
    f"strategy=mesh {TEXT} world_size=3 tp=2": "3 is 3 ranks, dp 1 x pp 1 x tp 2 is 2 ranks",
    f"strategy=mesh {TEXT} pp=2 split_points=2,3": r"2 split points \(2, 3\) for 2 stages: give 1",
    f"strategy=mesh {TEXT} pp=2 builtin=True": "has no pipeline here, got pp 2",
    f"strategy=mesh {TEXT} tp=2 schedule=zero_bubble": "use gpipe or 1f1b, or tp 1",
    f"strategy=mesh {TEXT} dp=3 batch_size=2": "batch_size 2 is smaller than dp 3",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_run_is_refused(words):
    settings = dict(word.split("=") for word in words.split())
    settings |= {"builtin": True} if "builtin" in settings else {}
    numbers = {name: int(text) for name, text in settings.items() if str(text).isdigit()}
    settings |= {name: number for name, number in numbers.items() if name != "split_points"}
    with pytest.raises(ValueError, match=REFUSED[words]):
        resolve(RunConfig(**settings), NOTHING)
