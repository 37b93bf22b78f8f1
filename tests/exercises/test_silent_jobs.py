"""Silently wrong jobs: the fault that is drawn is the only one, and its evidence tells it."""

import pytest
import torch
from torch import nn

import labkit
from workbook import check
from workbook.exercises import silent_jobs
from workbook.exercises.grader.report import NOT_YET
from workbook.exercises.programs import silent
from workbook.exercises.silent_jobs import apart

EXACT = 1e-12


def run(program, *arguments, world_size):
    return labkit.run(program, *arguments, world_size=world_size, device="cpu").values


def weighted_mean(clues):
    """The ranks' gradients, each with the weight of its tokens."""
    counts = [sum(map(sum, own)) for own in clues["lengths"].values()]
    pairs = zip(counts, clues["gradients"]["of its tokens at once"])
    return sum(count * gradient for count, gradient in pairs) / sum(counts)


def cause_of_tokens(clues):
    gradients = clues["gradients"]
    assert apart(weighted_mean(clues), gradients["one device"]) < EXACT
    assert apart(gradients["used"], gradients["one device"]) > 1e-3
    own_off = map(apart, gradients["own"], gradients["of its tokens at once"])
    return "micro-batches" if max(own_off) > EXACT else "the means of ranks"


def cause_of_blocks(clues):
    wrong = [by_rank for by_rank in clues["lengths"].values() if abs(by_rank[0] - 1) > 1e-9]
    is_factor = all(abs(ratio - len(own)) < 1e-9 for own in wrong for ratio in own)
    return "once more" if is_factor else "does not add up"


def cause_of_muon(clues):
    found, right = (clues["changes"][who] for who in ("3 ranks", "one device"))
    for name, gradient in clues["gradients"]["3 ranks"].items():
        assert apart(gradient, clues["gradients"]["one device"][name]) < EXACT
        is_divided = clues["rows"][name].count(0) < 2
        assert (apart(found[name], right[name]) > EXACT) == is_divided
    cosines = [nn.functional.cosine_similarity(found[name], right[name], 1) for name in found]
    return "a factor" if min(map(torch.min, cosines)) > 1 - EXACT else "a rule for whole"


def cause_of_last_bits(clues):
    assert clues["distances"]["float32"][-1] > clues["distances"]["float32"][0]
    is_rounding = clues["distances"]["float64"][-1] < 1e-12
    most = max(clues["versions"]["gradients of step 0"].values())
    assert (most > 1) == is_rounding
    return "different orders" if is_rounding else "weight decay"


CAUSES = {
    "tokens": cause_of_tokens,
    "blocks": cause_of_blocks,
    "muon": cause_of_muon,
    "last_bits": cause_of_last_bits,
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_seed_makes_the_same_case_again_and_leaves_the_page_its_random_numbers(name):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, other = (getattr(silent_jobs, name)(5) for _ in "ab")
    assert (one.answer, one.against) == (other.answer, other.against)
    assert torch.equal(state, torch.get_rng_state())


def test_muon_always_has_a_matrix_that_is_divided_and_takes_its_name_alone():
    # Drawn first, all cuts of this seed lie between two matrices.
    case = silent_jobs.muon(24)
    assert case.answer["matrices"]
    case.answer["matrices"] = ["query"]
    for answer in ("query", {"query"}, ("query",), ["query"]):
        assert case.objection("matrices", answer) == ""
    assert "are not those" in case.objection("matrices", "key")


@pytest.mark.parametrize("name", CAUSES)
def test_both_faults_are_drawn_and_the_evidence_tells_which_it_is(name):
    seen = set()
    for seed in range(6):
        case = getattr(silent_jobs, name)(seed)
        cause = case.suspects[case.answer["cause"]]
        assert CAUSES[name](case.clues) in cause, (seed, cause)
        seen.add(cause)
    assert len(seen) == 2


def test_tokens_in_equal_numbers_give_the_gradient_of_one_device():
    x = torch.randn(3, 2, 4, 6, 4).double()
    lengths = torch.tensor([[[6, 1, 3, 2], [3, 3, 3, 3]]] * 3)
    data = (x, x.sum(-1, keepdim=True), lengths)
    model = nn.Linear(4, 1).double()
    alone = tuple(part.flatten(0, 2)[None, None] for part in data)
    logs = run(silent.tokens, model, data, 4, world_size=3)
    (device,) = run(silent.tokens, model, alone, 4, world_size=1)
    for log in logs:
        assert all(apart(a["weights"], b["weights"]) < EXACT for a, b in zip(log, device))


@pytest.mark.parametrize("world_size", [2, 3])
def test_blocks_without_a_fault_have_the_gradients_of_one_device(world_size):
    kinds = ["gate", "softplus", "tanh"]
    shapes = {"embed.0": (5, 6), "head.0": (6, 3)}
    for number in range(3):
        shapes |= {f"block {number}.0": (6, 12), f"block {number}.1": (12, 6)}
    weights = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    parts = {name: silent_jobs.parts_of(name, weights[name], world_size) for name in weights}
    alone = {name: [weight] for name, weight in weights.items()}
    data = (torch.randn(8, 5).double(), torch.randn(8, 3).double())
    (device,) = run(silent.blocks, kinds, alone, data, world_size=1)
    for rank, log in enumerate(run(silent.blocks, kinds, parts, data, world_size=world_size)):
        for name, gradient in log["gradients"].items():
            right = silent_jobs.parts_of(name, device["gradients"][name], world_size)[rank]
            assert apart(gradient, right) < EXACT, (rank, name)


@pytest.mark.parametrize("heights", [(3, 5, 4), (1, 2, 9), (7, 7, 7)])
def test_muon_that_unshards_matrices_that_are_not_tall_is_that_of_one_device(heights):
    weights = {f"w{n}": torch.randn(height, 9).double() for n, height in enumerate(heights)}
    data = (torch.randn(6, 9).double(), torch.randn(6, sum(heights)).double())
    job = (nn.ParameterDict(weights), data, True, 4)
    (device,) = run(silent.muon, *job, world_size=1)
    for log in run(silent.muon, *job, world_size=3):
        assert all(apart(a["weights"], b["weights"]) < EXACT for a, b in zip(log, device))


def test_rows_are_divided_equally_and_each_once():
    for heights in ([3, 5, 4], [1, 2, 9], [12, 0, 0], [2, 2, 2, 2, 2, 2]):
        rows = silent.rows_by_rank(heights, 3)
        for height, own in zip(heights, rows):
            assert [n for part in own for n in range(height)[part]] == list(range(height))
        sizes = [sum(own[rank].stop - own[rank].start for own in rows) for rank in range(3)]
        assert sizes == [sum(heights) // 3] * 3


def test_replicas_with_one_recipe_and_the_ring_are_equal_to_the_bit():
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))
    names = {name for name, _ in model.named_parameters()}
    recipe = {"lr": 1.0, "decay": 2e-7, "decayed": names, "one_shot_below": 0}
    data = torch.randn(2, 3, 5, 8, 8).unbind()
    logs = run(silent.last_bits, model, data, [recipe] * 3, world_size=3)
    assert len({str(log[-1]["checksums"]) for log in logs}) == 1


def test_a_hidden_program_is_shown_once_the_rest_is_named_and_calls_are_counted(capsys):
    case = silent_jobs.blocks()
    block = case.answer["block"]
    assert check.cases.blocks(case, block=(block + 1) % 4).status == NOT_YET
    assert check.cases.blocks(case, cause=case.answer["cause"]).status == NOT_YET
    assert "class Blocks" not in capsys.readouterr().out
    assert check.cases.blocks(case, block=block).status == NOT_YET
    number = case.answer["line"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if f"{number:4}  " in line]
    assert "Conjugate.apply(hidden" in line or "torch.sin(x @" in line
    # The same answer again is no other one.
    for _ in range(2):
        found = check.cases.blocks(case, **case.answer)
        assert found.passed
        assert "4 answers" in found.notes[-1]


def test_two_records_part_in_the_tensor_and_for_the_reason_of_the_fault():
    tokens = silent_jobs.compare_with_one_device(silent_jobs.tokens(1)).difference
    assert (tokens.step, tokens.phase) == (1, "gradient")
    assert "shares of unequal weight" in tokens.cause
    case = silent_jobs.muon(1)
    muon = silent_jobs.compare_with_one_device(case).difference
    assert (muon.step, muon.phase) == (1, "parameter")
    assert muon.name in case.answer["matrices"]
    assert "whole matrices" in muon.cause
    with pytest.raises(ValueError, match="tokens or muon"):
        silent_jobs.compare_with_one_device(silent_jobs.blocks(1))
