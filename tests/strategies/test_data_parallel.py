"""Data parallelism in one process: what its spans say."""

import labkit


def test_each_replica_goes_forward_and_backward_once_per_step():
    result = labkit.train_with(
        "data_parallel", devices="cpu,cpu,cpu", epochs=1, train_size=96, batch_size=32
    )
    for kind in ("forward", "backward"):
        # Device 0 computes the loss and its gradient, too.
        counts = [len(result.trace.of(0, kind, lane)) for lane in range(3)]
        assert counts == [2 * 3, 3, 3]
    assert "compute" not in result.trace.seconds_by_kind()
