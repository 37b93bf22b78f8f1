"""Training while hosts fail: nothing that counts is lost, and nothing of it is left."""

import itertools
import os
from dataclasses import replace

import psutil
import pytest

from labkit.costs import goodput
from labkit.engine.tracing import Span
from workbook import plots
from workbook.exercises.programs.faulty_hosts import Settings
from workbook.measure.failures import Fault, FaultyRun, result_of, train_with_faults

pytestmark = pytest.mark.fresh

# As quick as torchrun is; the last one is over before anybody has lost patience.
FAULTS = [Fault("kill", 1, 0.6), Fault("stop", 0, 5.0, lasts_s=1.5)]
FAULTS += [Fault("cut", 1, 10.0, lasts_s=1.5), Fault("stop", 1, 15.0, lasts_s=0.2)]
SETTINGS = Settings(every=30, recovery_s=2.0, patience_s=1.0, duration_s=16.0)


@pytest.mark.slow
def test_training_goes_on_after_each_fault_as_if_none_had_been():
    run = train_with_faults(FAULTS, SETTINGS)
    # On a busy machine the last one may come too late.
    assert len(run.faults) >= 3
    for fault, planned in zip(run.faults, FAULTS):
        assert fault == replace(planned, at_s=fault.at_s)
        assert fault.at_s >= planned.at_s
    assert sorted(run.losses) == list(range(1, len(run.losses) + 1))
    assert all(len(set(losses)) == 1 for losses in run.losses.values())
    # A fault costs at most the steps between two checkpoints.
    twice = sum(len(losses) - 1 for losses in run.losses.values())
    assert 0 < twice <= 3 * SETTINGS.every
    # A stop that nobody lost patience over is no failure. (A busy machine may have one more.)
    assert run.num_failures >= 3
    for rank in range(4):
        spans = [span for span in run.spans if span.rank == rank]
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s + 1e-6
        downs = [span for span in spans if span.kind == "down"]
        waits = [span for span in spans if span.kind == "wait"]
        # Host 0 is stopped, host 1 is killed and cut. (A busy machine may stop them once more.)
        least_downs = 1 if rank < 2 else 2
        assert len(downs) >= least_downs
        assert len(waits) >= 3 - least_downs
    # The folders of the agents and of the faults lie there.
    folder = os.environ["TMPDIR"]
    assert not [name for name in os.listdir(folder) if name.startswith("labkit-")]
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}
        assert not environment.get("LABKIT_AGENTS_FOLDER", "").startswith(folder)


def test_faults_in_a_recovery_and_unknown_ones_are_refused():
    with pytest.raises(ValueError, match="the second would meet the recovery"):
        train_with_faults([Fault("kill", 0, 1.0), Fault("kill", 1, 2.0)])
    with pytest.raises(ValueError, match="lasts 6 s, and a recovery"):
        train_with_faults([Fault("stop", 0, 1.0, lasts_s=6.0)])
    with pytest.raises(ValueError, match="kind"):
        Fault("flood", 0, 1.0)
    with pytest.raises(ValueError, match="host"):
        Fault("kill", 2, 1.0)


def noted(*steps_again):
    """What a rank notes that begins at 10 s, makes steps of 1 s, is started anew, and goes on."""
    events = [{"kind": "process", "start_s": 9.0, "end_s": 9.5, "pid": 1}]
    for step in (1, 2, 3):
        events.append({"kind": "step", "start_s": 9.0 + step, "end_s": 10.0 + step, "step": step})
    events.append({"kind": "process", "start_s": 16.0, "end_s": 16.0, "pid": 2})
    events.append({"kind": "recover", "start_s": 16.0, "end_s": 17.0})
    for at_s, step in enumerate(steps_again, start=17):
        events.append({"kind": "step", "start_s": at_s, "end_s": at_s + 1.0, "step": step})
    return [event | {"loss": 1.0} for event in events]


def test_what_ranks_have_noted_becomes_spans_and_gaps():
    fault = Fault("kill", 1, 3.5)
    run = result_of([fault], [noted(2, 3, 4)] * 4, begun_s=10.0)
    assert (run.num_failures, run.step_s, run.duration_s) == (1, 1.0, 10.0)
    assert {step: len(losses) for step, losses in run.losses.items()} == {1: 1, 2: 2, 3: 2, 4: 1}
    assert (run.goodput, run.between_failures_s) == (0.4, 10.0)
    for rank in range(4):
        spans = [(s.kind, s.start_s, s.end_s) for s in run.spans if s.rank == rank]
        gap = "down" if rank >= 2 else "wait"
        assert spans[-5:-1] == [
            ("train", 0.0, 3.0),
            (gap, 3.0, 6.0),
            ("recover", 6.0, 7.0),
            ("run again", 7.0, 9.0),
        ]
        assert spans[-1] == ("train", 9.0, 10.0)


@pytest.mark.slow
def test_a_fault_waits_until_training_goes_on_after_the_one_before():
    # No recovery is as short as that.
    settings = Settings(recovery_s=0.1, duration_s=6.0)
    first, second = train_with_faults(
        [Fault("kill", 1, 0.6), Fault("kill", 0, 0.8)], settings
    ).faults
    assert second.at_s > first.at_s + settings.patience_s


def test_the_figure_has_a_lane_per_rank_and_the_formula_beside_what_counted():
    spans = [Span(0, "train", 0.0, 2.0), Span(1, "train", 0.0, 1.0), Span(1, "down", 1.0, 1.2)]
    for number, kind in enumerate(("wait", "recover", "run again", "checkpoint"), start=6):
        spans.append(Span(1, kind, number / 5, number / 5 + 0.2))
    losses = {step: [1.0] for step in range(1, 11)}
    run = FaultyRun([Fault("kill", 0, 1.0)], spans, 1, losses, step_s=0.1, duration_s=2.0)
    figure = plots.replicas(run, 0.4)
    assert run.goodput == 0.5
    (axes,) = figure.figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["rank 0", "rank 1", "counted", "by the formula"]
    entries = [text.get_text() for text in figure.figure.legends[0].get_texts()]
    assert entries == ["train", "run again", "checkpoint", "recover"]
    assert {text.get_text() for text in axes.texts} == {"kill", "wait"}, "named on their bars"
    assert "50% of 2 s counted, by the formula 40%" in figure.caption
    assert "kill of host 0 at 1 s" in figure.alt
    unharmed = replace(run, faults=[], num_failures=0)
    assert goodput(0.5, 0.5, unharmed.between_failures_s, 1.0) == 0.5
    assert "no fault" in plots.replicas(unharmed, 0.5).alt
