"""The browser's prediction of a step is ``predict_split``, number by number."""

import random
from dataclasses import asdict
from pathlib import Path

import browser
import pytest

from labkit.costs.link import Link
from labkit.placement.stage_costs import LayerCost, Profile
from workbook.widgets import split_picture
from workbook.widgets.split_choice import Choice, SplitModels

pytestmark = [pytest.mark.browser]
if browser.missing():
    pytestmark.append(pytest.mark.skip(browser.missing()))

SPLITS = 200
SCRIPT = Path(split_picture.__file__).with_name("split_model.js")
# Import a module from its text, and call it for each case.
PREDICT = """
async ([text, cases]) => {
  const address = URL.createObjectURL(new Blob([text], {type: 'text/javascript'}));
  const {predictSplit, scaled} = await import(address);
  return cases.map(({profile, points, link, batch_size, micro_batches, schedule, frozen}) =>
    predictSplit(scaled(profile, batch_size), points, link, micro_batches, schedule, frozen));
}
"""
EXACT = ("split_points", "schedule", "micro_batches", "hop_bytes", "memory_bytes")
EXACT += ("first_trained",)
SUMS = ("forward_s", "backward_s", "hop_s", "step_s", "bubble")


@pytest.fixture(scope="module")
def predict():
    """The browser's predictions for (models, choice) pairs."""
    with browser.empty_page() as page:
        yield lambda splits: page.evaluate(
            PREDICT, [SCRIPT.read_text(), [as_case(*split) for split in splits]]
        )


def random_layer(rng: random.Random, i: int) -> LayerCost:
    seconds = [rng.choice([0.0, rng.expovariate(100)]) for _ in range(2)]
    parameter_bytes = rng.choice([0, rng.randrange(2**24)])
    # Odd numbers of bytes: half a batch has half a byte, which is rounded to an even number.
    return LayerCost(
        f"layer {i}", *seconds, rng.randrange(2**22), parameter_bytes, rng.randrange(2**22)
    )


def random_split(rng: random.Random) -> tuple[SplitModels, Choice]:
    num_layers, batch_size = rng.randint(2, 30), rng.choice([1, 3, 8, 32])
    layers = tuple(random_layer(rng, i) for i in range(num_layers))
    profile = Profile("random", batch_size, rng.randrange(2**20), layers)
    link = Link(rng.choice([0.0, rng.expovariate(1000)]), rng.expovariate(1e8))
    cuts = rng.randint(0, min(5, num_layers - 1))
    points = tuple(sorted(rng.sample(range(1, num_layers), cuts)))
    models = SplitModels(profile, link, frozen=rng.choice([0, rng.randint(0, num_layers)]))
    batches = batch_size, 4 * batch_size, max(1, batch_size // 2), max(1, batch_size // 4)
    micro_batches, schedule = rng.choice([1, 2, 3, 8, 16]), rng.choice(["gpipe", "1f1b"])
    choice = Choice(points, "this machine", micro_batches, schedule, rng.choice(batches))
    return models, choice


def as_case(models: SplitModels, choice: Choice) -> dict:
    """The arguments of the browser's functions."""
    profile, link = asdict(models.measured), asdict(models.links[choice.link])
    return {**choice._asdict(), "profile": profile, "link": link, "frozen": models.frozen}


def as_list(value):
    return list(value) if isinstance(value, tuple) else value


def same(one, other) -> bool:
    """Equal up to the last digits of a sum: Python 3.12 sums more exactly."""
    return one == pytest.approx(other, rel=1e-12, abs=1e-15)


def test_the_browser_predicts_what_python_predicts(predict):
    rng = random.Random(0)
    splits = [random_split(rng) for _ in range(SPLITS)]
    for (models, choice), shown in zip(splits, predict(splits), strict=True):
        split = models.predicted(choice)
        for name in EXACT:
            assert shown[name] == as_list(getattr(split, name)), name
        for name in SUMS:
            assert same(shown[name], as_list(getattr(split, name))), name
        slots = [(s["stage"], s["kind"], s["micro_batch"]) for s in shown["slots"]]
        assert slots == [slot[:3] for slot in split.slots()]
        times = [time for slot in split.slots() for time in slot[3:]]
        assert same([s[end] for s in shown["slots"] for end in ("start_s", "end_s")], times)


def test_every_message_has_its_time(predict):
    """What crosses a cut: an activation per micro-batch, and a gradient if there is one."""
    layers = [LayerCost(str(i), 1.0, 2.0, 8, 4, 0) for i in range(6)]
    models = SplitModels(Profile("six", 4, 8, tuple(layers)), Link(0.25, 0.0), frozen=3)
    (shown,) = predict([(models, Choice((2, 4), "this machine", 4, "1f1b", 4))])
    messages = [(one["cut"], one["kind"], one["micro_batch"]) for one in shown["transfers"]]
    there = [(cut, "activation", i) for cut in (0, 1) for i in range(4)]
    assert sorted(messages) == sorted([*there, *((1, "gradient", i) for i in range(4))])
    ends = {(s["stage"], s["kind"], s["micro_batch"]): s["end_s"] for s in shown["slots"]}
    for one in shown["transfers"]:
        kind = "forward" if one["kind"] == "activation" else "backward"
        sender = one["cut"] + (kind == "backward")
        assert one["start_s"] == ends[sender, kind, one["micro_batch"]]
        assert one["end_s"] - one["start_s"] == 0.25


def test_half_a_byte_is_rounded_as_in_python(predict):
    layers = tuple(LayerCost(str(i), 0.0, 0.0, 2 * i + 1, 0, 2 * i + 1) for i in range(9))
    models = SplitModels(Profile("odd", 2, 1, layers), Link(0, 0), 0)
    choice = Choice((1, 2, 3, 4, 5, 6, 7, 8), "this machine", 1, "gpipe", 1)
    (shown,) = predict([(models, choice)])
    assert shown["hop_bytes"] == [0, 2, 2, 4, 4, 6, 6, 8]
    assert shown["hop_bytes"] == list(models.predicted(choice).hop_bytes)
    assert shown["bubble"] == 0, "in a step that takes no time"
