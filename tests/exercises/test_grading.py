"""What all checks share: verdicts, a page's own exercises, and what is said of a wrong value."""

import time

import pytest
import torch
from answers.ring import through_rank_0
from torch import autograd
from torch.nn import functional

from labkit import collectives
from labkit.collectives.ring import split_chunks
from workbook import check
from workbook.exercises.ddp import small_model
from workbook.exercises.grader import grader, on_ranks, solved
from workbook.exercises.grader.exercise import Case
from workbook.exercises.grader.judge_values import in_words, made_of, wrong_part

NAIVE = check.ring.naive_all_reduce


def test_a_function_without_ranks_is_graded_by_its_answers():
    mistakes = {"it is the larger one": lambda solution, a, b: max(a, b)}
    adds = solved((1, 2), (2, 1), mistakes=mistakes)(lambda a, b: a + b)
    assert adds(lambda x, y: x + y).passed
    assert "It is the larger one.\nWith a=1, b=2: it is 2, expected 3" in repr(adds(max))
    # A mistake has to explain all answers.
    assert "larger" not in repr(adds(lambda a, b: b))
    assert not adds(lambda a, b: a[b])
    ones = solved((2,), mistakes={})(lambda size: torch.ones(size))
    assert ones(lambda size: [1.0] * size).passed
    calls = []
    said = repr(adds(lambda a, b: calls.append(a) or a + b + (len(calls) > 1)))
    assert "The first call, with the same arguments, went right" in said
    drawn = []
    same = solved(more=lambda random: drawn.append(random.random()) or [(drawn[-1],)])(abs)
    assert all(same(lambda x: x).passed for _ in "ab")
    assert drawn[0] != drawn[1], "others in each check"


def test_a_wrong_value_is_told_by_its_factor_or_its_order():
    product = solved((2, 3), (4, 5), (6, 7))(lambda a, b: a * b)
    assert "In each case it is 0.5 times the expected" in repr(product(lambda a, b: a * b / 2))
    assert "times" not in repr(product(lambda a, b: a * b + 1))
    assert "times" not in repr(product(lambda a, b: a * b * 1.00001))
    # Lists of other lengths, and dicts with other keys, from case to case.
    counts = solved((3,), (1,), (0,), (2,), (4,))(lambda n: [n + i for i in range(n)])
    assert "In each case it is 2 times" in repr(counts(lambda n: [2 * (n + i) for i in range(n)]))
    keys = solved((3,), (1,), (2,))(lambda n: {i: i + 1 for i in range(n)})
    assert "expected" in repr(keys(lambda n: {i: 0 for i in range(n)}))
    once = solved((2, 3), (2, 3))(lambda a, b: a * b)
    assert "times" not in repr(once(lambda a, b: a * b / 2))
    sides = solved((2, 3), (4, 5))(lambda a, b: {"sum": a + 2 * b, "both": [a, b]})
    said = repr(sides(lambda a, b: {"both": [b, a], "sum": a + 2 * b}))
    assert "in entry 'both': it is [3, 2], expected [2, 3]" in said
    assert "The right values, but not in their places." in said
    assert "a dict of 'sum', expected a dict of 'both', 'sum'" in repr(
        sides(lambda *_: {"sum": 5})
    )


def test_equal_entries_are_named_where_they_should_differ():
    tensors = solved((4,))(lambda n: [torch.ones(n), torch.ones(n), torch.arange(n) + 5.0])
    assert "entries" not in repr(tensors(lambda n: [torch.zeros(n), torch.zeros(n), 1 + 0 * n]))
    assert "Entries 0 and 2 are equal" in repr(tensors(lambda n: [torch.ones(n)] * 3))


def test_another_shape_is_named_as_it_is():
    turned = solved((2, 3))(lambda n, m: [torch.arange(6.0).view(n, m)])
    assert "It is transposed" in repr(turned(lambda n, m: [torch.arange(6.0).view(n, m).T]))
    pieces = solved((3,))(lambda n: [torch.ones(4)] * n)
    assert "it is a tensor [12], expected a list of 3" in repr(pieces(lambda n: torch.ones(12)))


def sums_what_all_have(comm, x, weight, gradient):
    y = collectives.ring_all_reduce(comm, x @ weight.T)
    return y, comm.world_size * gradient @ weight, gradient.T @ x


def reduces_twice(comm, gradient, num_samples):
    total = collectives.ring_all_reduce(comm, num_samples * gradient)
    return total / collectives.ring_all_reduce(comm, gradient.new_tensor([num_samples]))


def leaves_if_steps_are_left(comm, weight, gradient_of, steps, every):
    if comm.rank or steps % every == 0:
        collectives.ring_all_reduce(comm, weight, "mean")


@pytest.mark.slow
def test_a_call_that_never_ends_is_named_where_the_first_of_two_went_well():
    """Only second calls have steps that are left."""
    said = " ".join(
        repr(check.hosts.local_sgd(leaves_if_steps_are_left, world_sizes=(2,))).split()
    )
    assert "steps, an average every" in said
    assert "rank 0 has returned" in said
    assert "not yours" not in said


def receives_first(comm, mine):
    comm.recv(mine.clone(), (comm.rank - 1) % comm.world_size)


@pytest.mark.slow
def test_counts_of_ranks_and_calls_and_the_order_are_named():
    said = repr(check.tensor_parallel.row(sums_what_all_have, world_sizes=(3,)))
    assert "It is multiplied by 3: there are 3 ranks" in said
    said = " ".join(repr(check.ring.weighted_mean(reduces_twice, world_sizes=(3,))).split())
    assert "as many as 2 calls take, where one is enough" in said
    verdict = check.messages.round_trip(receives_first, world_sizes=(2,))
    assert verdict.notes[0].startswith("Deadlock: all receive first")


def test_a_sum_of_products_may_be_rounded_in_another_order():
    """Also where an input, which has the shape of the sum, is nearly zero."""
    column = check.tensor_parallel.column
    for seed in range(200):
        case = Case(4, 6, seed)
        y, _, of_weight = column.expected(0, case)
        first, *others = column.parts(case).values()
        assert not wrong_part(column, case, 0, [y, sum(others) + first, of_weight])
        assert wrong_part(column, case, 0, [y, sum(others) + 1.0001 * first, of_weight])


def test_a_gradient_may_be_rounded_in_another_order():
    """Also where what its samples add up to is nearly zero."""
    average = check.ddp.average
    for seed in range(200):
        # Rank 0 of two has all samples.
        case, model = Case(2, 0, seed), small_model()
        inputs, targets, batch_size = average.inputs(0, case)
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / batch_size
        value = torch.cat([one.flatten() for one in autograd.grad(loss, [*model.parameters()])])
        assert not wrong_part(average, case, 0, value)
        assert wrong_part(average, case, 0, 1.0001 * value)


def test_a_difference_of_one_element_may_be_rounded_in_another_order():
    case = Case(3, 1, 275)
    start, *after = case.tensor(3), case.tensor(3) - 0.1 * case.tensor(1)
    after.append(after[0] - 0.1 * case.tensor(2))
    assert abs(after[1]) < 0.1 * abs(start)
    assert not check.parameter_server.one_by_one.judge(case, [after[1], *after])
    assert check.parameter_server.one_by_one.judge(case, [after[1] + 1e-5, *after])


def new_sum(comm, tensor):
    tensor = tensor + 1
    through_rank_0(comm, tensor)


def test_a_tensor_that_has_not_changed_is_named():
    assert "It is as it was given" in " ".join(repr(NAIVE(new_sum, world_sizes=(2,))).split())


def test_what_is_printed_is_what_is_returned(capsys):
    verdict = NAIVE(collectives.naive_all_reduce)
    said = capsys.readouterr().out
    assert said == f"{verdict!r}\n"
    assert said.startswith("passed: ")
    assert verdict.columns == ["2 ranks", "3 ranks", "4 ranks"]


def polls(comm, tensor):
    through_rank_0(comm, tensor)
    time.sleep(1e-3)


def test_a_function_may_poll():
    assert NAIVE(polls, world_sizes=(2,)).passed


def then(change):
    """The right sum, and a change of what was given."""

    def fn(comm, tensor, numbers, model):
        through_rank_0(comm, tensor)
        change(tensor, numbers, model)

    return fn


GIVEN = check.Exercise(
    "leaves what it was given",
    expected=lambda rank, case: case.total(),
    inputs=lambda rank, case: (case.tensor(rank), [1, 2], torch.nn.Linear(2, 2)),
    signature="comm, tensor, numbers, model",
    sizes=(8,),
)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor, numbers, model: numbers.clear(),
        lambda tensor, numbers, model: model.eval(),
        lambda tensor, numbers, model: model.register_forward_hook(print),
        lambda tensor, numbers, model: setattr(model.weight, "data", torch.zeros(2, 2)),
        lambda tensor, numbers, model: torch.set_grad_enabled(False),
    ],
)
def test_what_a_function_does_to_its_other_arguments_is_noticed(change):
    assert check.grade(then(lambda *given: None), GIVEN, (2,)).passed
    assert not check.grade(then(change), GIVEN, (2,))


def flips_bits_of_floats(comm, tensor):
    return tensor ^ 1


def a_wordy_stub(comm, tensor):
    raise NotImplementedError("all ranks send to rank 0, which adds, and sends the sum back")


def test_a_stub_is_told_from_an_error_and_from_what_is_half_written(monkeypatch):
    assert NAIVE(flips_bits_of_floats).status == "not yet"
    assert NAIVE(a_wordy_stub).status == "not attempted yet"

    def untouched(comm, tensor):
        """tensor: [N]."""
        raise NotImplementedError

    monkeypatch.setattr(grader, "outcomes_of", lambda *args: pytest.fail("ranks were started"))
    assert NAIVE(untouched).status == "not attempted yet"


def stops_at_rank_1(comm, tensor):
    return tensor[comm.rank + 9 * (comm.rank == 1)] if len(tensor) == 10 else None


def test_a_function_takes_nothing_along_to_another_world_size():
    sizes = set()

    def fn(comm, tensor):
        sizes.add(comm.world_size)
        through_rank_0(comm, tensor)
        assert len(sizes) == 1

    assert NAIVE(fn).passed


def never_ends(comm, tensor):
    while True:
        time.sleep(0.01)


def test_an_error_is_told_with_its_case_and_line_and_without_a_traceback(monkeypatch):
    said = NAIVE(stops_at_rank_1).notes[-1]
    assert "with 2 ranks and 10 elements: rank 1 raised IndexError" in said
    assert "return tensor[comm.rank + 9 * (comm.rank == 1)]" in said
    assert "Traceback" not in said
    monkeypatch.setattr(on_ranks, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(on_ranks, "AGAIN_S", 1.0)
    assert "with 2 ranks and 96 elements: the run was still going" in NAIVE(never_ends).notes[0]


def test_a_verdict_is_a_card_in_a_notebook_and_shown_once(monkeypatch):
    rows = {"values": ["wrong"]}
    verdict = check.Verdict("a < b", "not yet", ["2 ranks"], rows, ["1 < 2\nline"], shown=True)
    page = verdict._repr_html_()
    assert "a &lt; b" in page
    assert "1 &lt; 2" in page
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    verdict._ipython_display_()
    assert not shown
    verdict._ipython_display_()
    assert shown[0]["text/plain"] == repr(verdict)
    lines = repr(check.Verdict("a", "not yet", notes=["word " * 40 + 100 * "x"])).split("\n")
    assert sorted(map(len, lines))[-3:] == [94, 94, 100]


def test_a_fit_tells_how_often_each_part_is_in_a_value():
    case = Case(world_size=4, size=96)
    basis = {f"rank {rank}": split_chunks(case.tensor(rank), 4)[1] for rank in range(4)}
    value = basis["rank 0"] + 2 * basis["rank 3"]
    assert in_words(made_of(value, basis)) == "rank 0 + 2 x rank 3"
    assert in_words(made_of(value / 2, basis)) == "0.5 x rank 0 + rank 3"
    # A small part has its own factor, and parts that are multiples of each other have none.
    small = basis | {"rank 1": 0.01 * basis["rank 1"]}
    assert in_words(made_of(value + 0.1 * small["rank 1"], small)) == (
        "rank 0 + 0.1 x rank 1 + 2 x rank 3"
    )
    assert made_of(value, basis | {"rank 4": 3 * basis["rank 3"]}) == {}
    assert made_of(value * float("nan"), basis) == {}
    assert made_of(torch.rand(24), basis) == {}
    assert made_of(value[:2], basis) == {}
    said = NAIVE(lambda comm, tensor: comm.barrier(), world_sizes=(3,)).notes[0]
    assert "it is rank 0, expected rank 0 + rank 1 + rank 2" in said
