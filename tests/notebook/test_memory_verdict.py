"""Which run took least memory, in a sentence."""

import pytest

from labkit.comm.peak_memory import PeakMemory
from labkit.runtime.launch import RunResult
from labkit.tracing import Trace
from workbook.notebook.memory_verdict import peak_memory


def ran(*peaks):
    nothing = [0] * len(peaks)
    return RunResult(list(nothing), Trace(), 1.0, nothing, nothing, peak_memory=list(peaks))


def test_the_run_whose_largest_rank_took_least_is_first():
    runs = {
        "all at once": ran(PeakMemory(3 * 2**20), PeakMemory(2**10)),
        "piece by piece": ran(PeakMemory(2**10), PeakMemory(2**20)),
    }
    told = peak_memory(runs)
    assert told.holds
    assert str(told) == (
        "Least peak memory: piece by piece, 1 MiB on rank 1; all at once took 3 times as much, "
        "3 MiB (rank 0)."
    )


def test_of_gpus_the_one_with_the_most_counts_and_close_ones_are_not_told_apart():
    gpus = {"cuda:0": 105, "cuda:1": 50}
    runs = {"one": ran(PeakMemory(2**30, gpus)), "other": ran(None, PeakMemory(100))}
    told = peak_memory(runs)
    assert told.holds is None
    assert "other, 100 B on rank 1; one took about as much, 105 B (rank 0, cuda:0)" in str(told)


def test_what_is_not_known_is_said():
    told = peak_memory({"one": ran(PeakMemory(None), PeakMemory(5)), "other": ran(PeakMemory(5))})
    assert str(told) == "The peak memory of one is not known: the system does not say."
    with pytest.raises(ValueError, match="nothing to compare"):
        peak_memory({"one": ran(PeakMemory(5))})
