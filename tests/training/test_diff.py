"""Where two runs part: faults planted in a loop of one's own, and layouts without a fault."""

import json
import math
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from ranks import travel_by_value
from torch import nn
from torch.nn.functional import cross_entropy

import labkit
from labkit import run
from labkit.training.diff import compare, diff_records
from labkit.training.recording import read_record
from labkit.workload.transformer import gpt

travel_by_value(__name__)

STEPS, SAMPLES = 4, 12


class Loop:
    """A careful loop of data parallelism; each fault overrides a part of it."""

    shares = (6, 6)
    micro_batches = 1
    momentum = 0.9
    weight_decay = 0.0

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def lr(self, step):
        return 0.1

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
        return inputs, torch.arange(SAMPLES) % 3

    def share(self, tensor):
        return tensor if self.world_size == 1 else tensor.split(self.shares)[self.rank]

    def loss(self, outputs, targets):
        # Of the mean over the batch; the sum over ranks is then divided by 1.
        return cross_entropy(outputs, targets, reduction="sum") / SAMPLES * self.world_size

    def forward_backward(self, model, inputs, targets):
        parts = zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches))
        for inputs_part, targets_part in parts:
            self.loss(model(inputs_part), targets_part).backward()

    def synchronize(self, model):
        for parameter in model.parameters():
            if self.world_size > 1 and parameter.grad is not None:
                self.all_reduce(parameter)
                parameter.grad /= self.world_size

    def all_reduce(self, parameter):
        dist.all_reduce(parameter.grad)

    def zero(self, optimizer):
        optimizer.zero_grad()

    def train(self, folder):
        model = self.model()
        optimizer = torch.optim.SGD(
            model.parameters(), 0.1, momentum=self.momentum, weight_decay=self.weight_decay
        )
        with labkit.recording(model, optimizer, folder):
            for step in range(1, STEPS + 1):
                inputs, targets = self.batch(step)
                self.zero(optimizer)
                self.forward_backward(model, self.share(inputs), self.share(targets))
                self.synchronize(model)
                optimizer.param_groups[0]["lr"] = self.lr(step)
                optimizer.step()


class MeanOfShare(Loop):
    """The usual loss: a mean over the share, which the mean over ranks makes right."""

    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets) / self.micro_batches


class NotDivided(MeanOfShare):
    def synchronize(self, model):
        for parameter in model.parameters():
            self.all_reduce(parameter)


class DividedTwice(MeanOfShare):
    def all_reduce(self, parameter):
        super().all_reduce(parameter)
        parameter.grad /= self.world_size


class SummedTwice(MeanOfShare):
    def all_reduce(self, parameter):
        super().all_reduce(parameter)
        super().all_reduce(parameter)


class NeverSummed(MeanOfShare):
    def all_reduce(self, parameter):
        pass


class OneLayerNotSummed(MeanOfShare):
    def all_reduce(self, parameter):
        if parameter.shape != (8,):
            super().all_reduce(parameter)


class NotBroadcast(MeanOfShare):
    def model(self):
        torch.manual_seed(self.rank)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class OtherSeed(MeanOfShare):
    def model(self):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class RateByRank(MeanOfShare):
    def lr(self, step):
        return 0.1 * (1 + self.rank)


class FrozenOnOneRank(MeanOfShare):
    def synchronize(self, model):
        super().synchronize(model)
        if self.rank == 1:
            model[0].weight.grad = None


class DoubleRate(MeanOfShare):
    def lr(self, step):
        return 0.2


class LateSchedule(MeanOfShare):
    def lr(self, step):
        return 0.1 if step < 3 else 0.05


class WeightDecay(MeanOfShare):
    weight_decay = 0.1


class NoMomentum(MeanOfShare):
    momentum = 0.0


class UnequalShares(MeanOfShare):
    shares = (8, 4)


class Padded(MeanOfShare):
    def loss(self, outputs, targets):
        padded = targets.clone()
        padded[: 3 * self.rank] = -100
        return cross_entropy(outputs, padded)


class NotDividedByMicroBatches(MeanOfShare):
    micro_batches = 3

    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets)


class DividedTwiceByMicroBatches(MeanOfShare):
    micro_batches = 3

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / 3


class NotSetToZero(MeanOfShare):
    def zero(self, optimizer):
        pass


class Detached(MeanOfShare):
    def forward_backward(self, model, inputs, targets):
        self.loss(model[2](model[1](model[0](inputs)).detach()), targets).backward()


class ClippedBeforeTheSum(MeanOfShare):
    def forward_backward(self, model, inputs, targets):
        super().forward_backward(model, inputs, targets)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class OtherOrder(MeanOfShare):
    def share(self, tensor):
        return super().share(tensor) if self.world_size == 1 else tensor.split(self.shares)[0]


class Dropout(MeanOfShare):
    def forward_backward(self, model, inputs, targets):
        dropped = nn.functional.dropout(model[1](model[0](inputs)), 0.5)
        self.loss(model[2](dropped), targets).backward()


# By fault: the step, the phase and the name at which it must be seen, and what is said of it.
FAULTS = {
    NotDivided: (1, "gradient", "2.bias", "2 x .*number of ranks: .*not divided"),
    DividedTwice: (1, "gradient", "2.bias", "0.5 x .*1 / the number of ranks"),
    SummedTwice: (1, "gradient", "2.bias", "2 x .*added twice and divided once"),
    NeverSummed: (1, "gradient", "2.bias", "not summed on all"),
    OneLayerNotSummed: (1, "gradient", "0.bias", "not summed on all"),
    NotBroadcast: (0, "parameter", "0.weight", "not broadcast"),
    OtherSeed: (0, "parameter", "0.weight", "another seed"),
    RateByRank: (1, "parameter", "0.weight", "differ by rank"),
    FrozenOnOneRank: (1, "gradient", "0.weight", "different gradients"),
    DoubleRate: (1, "parameter", "0.weight", "2 x .*learning rate"),
    LateSchedule: (3, "parameter", "0.weight", "schedule|optimizer"),
    WeightDecay: (1, "parameter", "0.weight", "weight decay"),
    NoMomentum: (2, "parameter", "0.weight", "momentum"),
    UnequalShares: (1, "gradient", "2.bias", "mean of means"),
    Padded: (1, "gradient", "2.bias", "mean of means"),
    NotDividedByMicroBatches: (1, "gradient", "2.bias", "3 x .*micro-batches added"),
    DividedTwiceByMicroBatches: (1, "gradient", "2.bias", "micro-batches twice"),
    NotSetToZero: (2, "gradient", "2.bias", ""),
    Detached: (1, "gradient", "0.bias", "nothing arrives"),
    ClippedBeforeTheSum: (1, "gradient", "2.bias", "clipping before"),
    OtherOrder: (1, "forward", "inputs", "batches differ"),
    Dropout: (1, "forward", "2", "random numbers"),
}


def train_all(comm, loops, folder):
    for loop in loops:
        loop(comm.rank, comm.world_size).train(f"{folder}/{loop.__name__}")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The folder with a record of each loop, on one rank and on two."""
    folder = tmp_path_factory.mktemp("records")
    loops = [Loop, MeanOfShare, *FAULTS]
    run(train_all, loops, str(folder), world_size=2, device="cpu")
    Loop(0, 1).train(folder / "one")
    return folder


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_with_its_step_tensor_and_cause(fault, records):
    step, phase, name, words = FAULTS[fault]
    comparison = diff_records(records / "one", records / fault.__name__)
    found = comparison.difference
    assert found is not None
    assert (found.step, found.phase, found.name) == (step, phase, name), comparison
    assert re.search(words, str(comparison), re.DOTALL), comparison


@pytest.mark.parametrize("loop", [Loop, MeanOfShare], ids=lambda loop: loop.__name__)
def test_a_loop_without_a_fault_equals_one_device(loop, records):
    comparison = diff_records(records / "one", records / loop.__name__)
    assert comparison.equal, comparison
    assert comparison.largest[0] < 1e-12
    assert comparison.num_tensors > 2 * STEPS * 8


def test_another_batch_is_told_where_ranks_do_the_same_work(records):
    comparison = diff_records(records / "MeanOfShare", records / "OtherOrder")
    found = comparison.difference
    assert (found.step, found.name, found.rank) == (1, "inputs", 1)
    assert "batches differ" in found.cause


class Tokens(Loop):
    """Inputs are integers, and the next batch draws numbers before the update, as loaders do."""

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 3)).double()

    def batch(self, step):
        return torch.arange(2 * SAMPLES).view(SAMPLES, 2) * step % 9, torch.arange(SAMPLES) % 3

    def synchronize(self, model):
        torch.rand(1)


class OtherTokens(Tokens):
    def batch(self, step):
        inputs, targets = super().batch(step)
        return inputs.flip(0), targets


class TokensAtDoubleRate(Tokens):
    def lr(self, step):
        return 0.2


def test_tokens_are_inputs_and_what_a_loader_draws_is_not_the_models(tmp_path):
    for loop in (Tokens, OtherTokens, TokensAtDoubleRate):
        loop(0, 1).train(tmp_path / loop.__name__)
    other = diff_records(tmp_path / "Tokens", tmp_path / "OtherTokens").difference
    assert (other.step, other.name) == (1, "inputs")
    assert "batches differ" in other.cause
    faster = diff_records(tmp_path / "Tokens", tmp_path / "TokensAtDoubleRate").difference
    assert faster.phase == "parameter"
    assert "learning rate" in faster.cause


def test_a_record_that_cannot_be_compared_is_refused(records, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no record"):
        read_record(tmp_path)
    lines = (records / "one" / "rank-0.jsonl").read_text().splitlines()
    other = tmp_path / "rank-0.jsonl"
    other.write_text(json.dumps(json.loads(lines[0]) | {"version": 99}) + "\n")
    with pytest.raises(ValueError, match="version 99"):
        read_record(tmp_path)
    other.write_text("\n".join([lines[0], lines[1][:20], lines[2]]))
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read_record(tmp_path)
    (records / "Loop" / "rank-1.jsonl").rename(tmp_path / "rank-1.jsonl")
    with pytest.raises(FileNotFoundError, match=r"not of \[1\]"):
        read_record(records / "Loop")
    (tmp_path / "rank-1.jsonl").rename(records / "Loop" / "rank-1.jsonl")
    other.write_text(
        "\n".join([lines[0], *(line.replace("2.bias", "head") for line in lines[1:])])
    )
    renamed = "\n".join([lines[0], *(re.sub(r'"name": "', '"name": "x', x) for x in lines[1:])])
    other.write_text(renamed)
    with pytest.raises(ValueError, match="not one model"):
        compare(read_record(records / "one"), read_record(tmp_path))


class SmallerBatch(Loop):
    def batch(self, step):
        return [tensor[:9] for tensor in super().batch(step)]


class WithNaN(Loop):
    def batch(self, step):
        inputs, targets = super().batch(step)
        return (inputs * math.nan if step == 3 else inputs), targets


def test_runs_that_are_not_one_are_refused_with_their_numbers(records, tmp_path):
    SmallerBatch(0, 1).train(tmp_path / "smaller")
    with pytest.raises(ValueError, match=r"\[72\] values .* \[54\]"):
        diff_records(records / "one", tmp_path / "smaller")
    # The second would continue the first's run, and have no step to compare.
    with pytest.raises(ValueError, match="leave out checkpoint_dir, resume"):
        labkit.diff("ddp", checkpoint_dir=str(tmp_path), resume=True)
    with pytest.raises(ValueError, match="against has seed"):
        labkit.diff("ddp", world_size=2, against={"strategy": "single", "seed": 1})
    for seed in (0, 1):
        labkit.train_with("single", record=str(tmp_path / f"{seed}"), seed=seed, train_size=64)
    with pytest.raises(ValueError, match="seed 0 and 1"):
        diff_records(tmp_path / "0", tmp_path / "1")
    optimizer = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(ValueError, match="no parameters"):
        labkit.recording(nn.ReLU(), optimizer, tmp_path).__enter__()


def test_nan_in_both_is_said(tmp_path):
    for name in ("a", "b"):
        WithNaN(0, 1).train(tmp_path / name)
    comparison = diff_records(tmp_path / "a", tmp_path / "b")
    assert "step 3: both have NaN or inf in inputs" in str(comparison)
    assert comparison.steps == 3


def test_a_run_that_ended_early_is_compared_as_far_as_it_went(tmp_path, records):
    class Fails(Loop):
        def batch(self, step):
            if step == 3:
                raise KeyError("no such file")
            return super().batch(step)

    with pytest.raises(KeyError):
        Fails(0, 1).train(tmp_path)
    comparison = diff_records(records / "one", tmp_path)
    assert comparison.equal
    assert comparison.steps == 2
    assert "ends in step 2" in str(comparison)
    lines = (records / "one" / "rank-0.jsonl").read_text().splitlines()
    start = [line for line in lines[1:] if '"step": 0,' in line]
    (tmp_path / "rank-0.jsonl.part").write_text("\n".join([lines[0], *start]))
    with pytest.raises(ValueError, match="no step in common"):
        diff_records(records / "one", tmp_path)


def test_ranks_are_compared_up_to_the_step_before_one_of_them_was_killed(tmp_path, records):
    shutil.copytree(records / "MeanOfShare", tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "rank-1.jsonl").read_text()
    (tmp_path / "rank-1.jsonl").unlink()
    (tmp_path / "rank-1.jsonl.part").write_text(text[: text.index('{"step": 3') + 9])
    comparison = diff_records(records / "one", tmp_path)
    assert comparison.steps == 1
    assert "rank-1.jsonl.part ends in step 2" in str(comparison)


def small_gpt():
    return nn.Sequential(*gpt((64,), 80, width=24, num_heads=6, num_blocks=1))


TEXT = {"model": small_gpt, "dataset": "text", "batch_size": 16, "lr": 0.01}
LAYOUTS = [
    ("ddp", {"world_size": 2, "bucket_mb": 0.01, "accumulate": 3}),
    ("sharded", {"world_size": 3}),
    ("pipeline", {"world_size": 2, "micro_batches": 3, "schedule": "1f1b"}),
    ("tensor_parallel", {"world_size": 2, **TEXT}),
]
MORE_LAYOUTS = [
    ("ddp", {"world_size": 3, "builtin": True}),
    ("ddp", {"world_size": 2, "amp": "bf16"}),
    ("parameter_server", {"world_size": 4, "servers": 2}),
    ("data_parallel", {"devices": "cpu,cpu"}),
    ("model_parallel", {"world_size": 3}),
    ("pipeline", {"world_size": 3, "micro_batches": 5, "schedule": "zero_bubble"}),
    ("pipeline", {"world_size": 2, "schedule": "interleaved"}),
    ("pipeline", {"world_size": 2, "builtin": True}),
    ("sharded", {"world_size": 2, "stage": 1}),
    ("sharded", {"world_size": 2, "builtin": True}),
    ("mesh", {"dp": 2, "pp": 2}),
    ("mesh", {"dp": 2, "tp": 2, **TEXT}),
    ("tensor_parallel", {"world_size": 3, "sequence_parallel": True, **TEXT}),
]


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.more) for layout in MORE_LAYOUTS)],
)
def test_layouts_without_a_fault_are_equal(strategy, settings):
    against = {"strategy": "single"}
    if "amp" in settings:
        against["amp"] = settings["amp"]
    comparison = labkit.diff(strategy, against=against, steps=3, **{"batch_size": 10} | settings)
    assert comparison.equal, comparison
    assert comparison.steps == 3


def test_dropout_is_told_from_a_fault():
    def model():
        layers = [nn.Flatten(), nn.Linear(64, 8), nn.Dropout(), nn.Linear(8, 10)]
        return nn.Sequential(*layers)

    comparison = labkit.diff("ddp", world_size=2, model=model, steps=2)
    assert not comparison.equal
    assert "random numbers" in str(comparison)


def test_nothing_is_left_of_the_records(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    labkit.diff("ddp", world_size=1, steps=1, train_size=64)
    assert list(tmp_path.glob("labkit-diff-*")) == []
