"""A run whose loss is no longer finite ends on all ranks, and says what to try."""

import pytest

from labkit import WorkerError, train_with

FAR = {"train_size": 120, "batch_size": 20, "lr": 2e9, "epochs": 3}


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_a_loss_that_is_not_finite_ends_the_run(strategy, tmp_path):
    told = (
        r"not finite after step \d of epoch 1, with learning rate 2000000000.0: try a smaller lr"
    )
    with pytest.raises(WorkerError, match=told):
        train_with(strategy, world_size=2, **FAR)
    # With checkpoints the ranks agree after every step, and none of such parameters is saved.
    with pytest.raises(WorkerError, match=told):
        train_with(strategy, world_size=2, checkpoint_dir=str(tmp_path), **FAR)
    assert not list(tmp_path.iterdir())


def test_steps_that_fp16_skips_are_none():
    result = train_with("ddp", world_size=2, amp="fp16", **FAR | {"lr": 0.05})
    assert result.epochs[-1]["loss"] < result.epochs[0]["loss"]
