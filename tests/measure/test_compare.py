"""labkit compare: what is run, what a record says, and the figures' claims."""

import pytest

from labkit import strategies
from labkit.__main__ import main
from workbook.measure import compare
from workbook.measure.compare import figures, summary
from workbook.measure.compare.measure import find_contenders, settings_of

pytestmark = pytest.mark.slow


def contender(name, **more):
    one = {"name": name, "strategy": name, "builtin": False, "backend": "auto"}
    return one | {"counterpart": None} | more


def run_row(name, setting, repeat, seconds):
    """A run whose first epoch takes 1 s more than the others."""
    took, accuracy = [seconds + 1, seconds, seconds], (0.5, 0.9, 0.96)
    return {
        "contender": name,
        "setting": setting,
        "repeat": repeat,
        "epochs": [
            {"loss": 1.0, "test_accuracy": a, "seconds": s} for a, s in zip(accuracy, took)
        ],
        "bytes_sent": [2048, 4096] if name == "ring" else None,
        "messages": None,
        "peak_memory": [{"process_bytes": 2**20, "devices": {}}, None],
        "replicas_agree": True,
        "note": None,
        "difference_from_single": 1e-7,
    }


@pytest.fixture
def record():
    """ring takes 1 s an epoch, PyTorch 2 s and single 3 s; half of it on half of the samples."""
    # Older records have other numbers of ranks, too, which count nowhere.
    settings = [(2, 100, 32), (2, 50, 32), (4, 100, 32)]
    names = ("world_size", "train_size", "batch_size")
    runs = []
    for repeat, drift in enumerate((1.0, 2.0, 1.1)):
        for index, factor in enumerate((1.0, 0.5, 3.0)):
            for name, seconds in (("ring", 1.0), ("Torch", 2.0), ("single", 3.0)):
                runs.append(run_row(name, index, repeat, seconds * factor * drift))
    single, ours = contender("single", ranks=1), contender("ring", counterpart="Torch")
    theirs = contender("Torch", strategy="ring", builtin=True)
    return {
        "command": "labkit compare",
        "config": {"model": "mlp", "dataset": "digits", "target": 0.95, "repeats": 3},
        "contenders": [single, ours, theirs],
        "settings": [dict(zip(names, one)) | {"epochs": 3} for one in settings],
        "runs": runs,
        "skipped": [],
        "hardware": {"cores": 2, "cpu": "a CPU", "gpus": []},
        "versions": {},
    }


@pytest.mark.parametrize("names", [(), strategies.STRATEGIES], ids=["by default", "all"])
def test_every_class_takes_part_once_and_single_is_first(names):
    found = find_contenders(names)
    assert found[0]["name"] == "single"
    assert {one["name"] for one in found if not one["builtin"]} == {*strategies.STRATEGIES}
    assert len({one["name"] for one in found}) == len(found)
    builtins = {one["name"] for one in found if one["builtin"]}
    assert {one["counterpart"] for one in found} <= builtins | {None}


def test_all_samples_come_first_and_fewer_only_measure_times():
    found = settings_of(2, (25, 100, 50, 25), 32, epochs=6)
    assert [tuple(one.values()) for one in found] == [
        (2, 100, 32, 6),
        (2, 25, 32, 3),
        (2, 50, 32, 3),
    ]


def test_an_epochs_time_leaves_out_the_first_and_time_to_target_counts_it(record):
    assert summary.epoch_times(record, "ring") == [1.0, 2.0, 1.1]
    assert summary.reached(record, "ring")[0] == (3, 4.0)
    assert summary.times_faster(record, "ring", "Torch") == [2.0, 2.0, 2.0], "drift drops out"
    record["config"]["target"] = 0.99
    assert summary.reached(record, "ring") is None
    assert "within 3 epochs: single, ring, Torch." in figures.time_to_accuracy(record).caption


def test_the_figure_says_what_the_numbers_say(record):
    # Three epochs, the first 1 s longer: 3 x 1.1 + 1.
    said = "First at 95%: ring, after 4.3 s. Last at 95%: single, after 10.9 s."
    figure = figures.time_to_accuracy(record)
    assert said in figure.caption
    assert figure.png()
    record["runs"][0]["epochs"][-1]["loss"] = None  # diverged: JSON has no NaN
    record["runs"][0]["difference_from_single"] = None
    assert figures.time_to_accuracy(record).caption == figure.caption
    assert "not finite" in summary.report(record)


def test_a_run_is_recorded(tmp_path, capsys):
    """On real ranks: three contenders and single, one setting, one epoch of 60 samples."""
    words = ["compare", "--strategies", "ring_all_reduce,model_parallel", "--model", "mlp"]
    words += ["--device", "cpu", "--lr", "0.01", "--split-points", "1", "1,2"]
    words += ["--train-size", "60", "--batch-size", "16", "--world-size", "2", "--epochs", "1"]
    words += ["--repeats", "1", "--json", f"{tmp_path}/out.json"]
    assert main(words) == 0
    found = compare.load(tmp_path / "out.json")
    names = ["single", "ring_all_reduce", "TorchDDP", "TorchDDP (labkit)", "model_parallel"]
    names += ["model_parallel 1", "model_parallel 1,2", "TorchModelParallel"]
    assert [run["contender"] for run in found["runs"]] == names
    assert [len(run["bytes_sent"] or ()) for run in found["runs"]][4:] == [2, 2, 3, 0]
    for run in found["runs"]:
        assert run["difference_from_single"] < 1e-5
        assert run["replicas_agree"]
    assert summary.report(found) in capsys.readouterr().out
    assert figures.time_to_accuracy(found).png()


PARTS = """
import torch
model = lambda: [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)]
data = lambda: (torch.randn(20, 4), torch.arange(20) % 2)
group = lambda p: {"params": [p], "weight_decay": p.dim() / 9}
optimizer = lambda ps: torch.optim.Adam([group(p) for p in ps])
"""


def test_ones_own_parts_are_compared_or_a_technique_says_why_not(tmp_path, monkeypatch):
    (tmp_path / "compared_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    words = "compare --strategies ring_all_reduce,sharded --no-builtin --device cpu --epochs 1 "
    words += "--model compared_parts:model --dataset compared_parts:data --json out.json "
    words += "--optimizer compared_parts:optimizer"
    words += " --train-size 18 --batch-size 8 --world-size 2 --repeats 1"
    assert main(words.split()) == 0
    found = compare.load("out.json")
    assert [run["contender"] for run in found["runs"]] == ["single", "ring_all_reduce"]
    assert all(run["difference_from_single"] < 1e-5 for run in found["runs"])
    assert "would not equal one device" in found["skipped"][0]["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "950"], "the target, an accuracy, must be at most 1, got 9.5"),
        (["--batch-size", "2", "--world-size", "4"], "smaller than world_size 4"),
        (["--json", "/nowhere/out.json"], "in a folder that exists"),
    ],
)
def test_errors_of_use_are_one_line_and_exit_2(words, message, refused):
    assert message in refused("compare", *words)
