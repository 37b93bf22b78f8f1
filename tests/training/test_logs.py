"""TensorBoard's files: also of a run that goes on, and never at the cost of the run."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from labkit import train_with

SETTINGS = {"model": "mlp", "train_size": 64, "batch_size": 32, "device": "cpu"}


def test_tensorboard_reads_each_epoch_once_also_after_a_resumption(tmp_path):
    folders = {"log_dir": str(tmp_path / "logs"), "checkpoint_dir": str(tmp_path / "saved")}
    settings = {**SETTINGS, **folders}
    train_with("ring_all_reduce", world_size=2, epochs=2, **settings)
    after = train_with("ring_all_reduce", world_size=2, epochs=3, resume=True, **settings)
    found = EventAccumulator(folders["log_dir"]).Reload()
    for name in after.epochs[0]:
        events = found.Scalars(name)
        assert [event.step for event in events] == [1, 2, 3]
        assert [event.value for event in events] == pytest.approx([e[name] for e in after.epochs])
