"""Targets that are ignored: the numbers of one device, whatever the ranks' shares hold."""

import pytest
import torch
from torch import nn

from labkit import train_with
from labkit.training.result import largest_difference
from labkit.workload.samples import epoch_order
from labkit.workload.transformer import gpt

GENERATOR = torch.Generator().manual_seed(4)
TOKENS = torch.randint(6, (13, 4), generator=GENERATOR)
TARGETS = torch.randint(6, (13, 4), generator=GENERATOR)
# Of every second sample all targets are ignored, and of the last batch, which is one sample.
TARGETS[torch.rand(13, 4, generator=GENERATOR) < 0.4] = -100
TARGETS[::2] = -100
TARGETS[epoch_order(13, epoch=0, seed=0)[-1]] = -100
HELD_OUT = TOKENS[:5].flip(0), TARGETS[3:8]
SETTINGS = {"dataset": ((TOKENS, TARGETS), HELD_OUT), "batch_size": 4, "dtype": "float64"}
NUMBERS = ("loss", "train_accuracy", "test_accuracy", "test_loss")


def small():
    torch.manual_seed(0)
    return nn.Sequential(*gpt((4,), 6, width=12, num_heads=2, num_blocks=1))


def test_a_cut_vocabulary_ends_where_one_device_does_and_says_so():
    """tests/training/test_evaluation.py has the other techniques."""
    alone = train_with("single", model=small, **SETTINGS)
    result = train_with("tensor_parallel", model=small, **SETTINGS, world_size=2)
    assert largest_difference(result.state, alone.state) < 1e-10
    row, expected = result.epochs[0], alone.epochs[0]
    assert [row[n] for n in NUMBERS] == pytest.approx([expected[n] for n in NUMBERS], rel=1e-10)


def test_weights_that_the_data_decide_cost_one_number_per_step():
    """Four steps on two ranks, of a data set with and without ignored targets."""
    whole = SETTINGS | {"dataset": (TOKENS, TARGETS.abs() % 6), "world_size": 2}
    plain = train_with("ring_all_reduce", model=small, **whole)
    padded = train_with("ring_all_reduce", model=small, **SETTINGS, world_size=2)
    for rank in range(2):
        assert padded.messages[rank] - plain.messages[rank] == 4
        assert padded.bytes_sent[rank] - plain.bytes_sent[rank] == 4 * 8


def test_tokens_that_no_rank_has_are_refused_before_training():
    message = "tokens from 4 to 9, and the model's embedding has 0 to 5"
    with pytest.raises(ValueError, match=message):
        train_with("tensor_parallel", world_size=2, model=small, dataset=(TOKENS + 4, TARGETS))
