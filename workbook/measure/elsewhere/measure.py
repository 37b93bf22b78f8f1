"""The one run: in each round every contender that is here trains once, in turns."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from labkit.units import check_choice, check_integer
from workbook.measure.elsewhere.contenders import CONTENDERS, ONE_DEVICE, Contender
from workbook.measure.elsewhere.digits import SCRIPTS, prepare
from workbook.measure.elsewhere.result import ElsewhereResult, Found
from workbook.measure.elsewhere.turn import TurnError
from workbook.measure.processes import as_ctrl_c

# Who trains for longer than this hangs: the slowest takes some seconds to start.
_LIMIT_S = 120.0

# Called before each turn, with the number of the round, from 1, and the contender.
Tell = Callable[[int, str], object]


def bench_elsewhere(
    contenders: Sequence[str] | None = None, steps: int = 40, repeats: int = 3
) -> Iterator[ElsewhereResult]:
    """Train the same model with every contender; compare losses, bytes and seconds.

    Args:
        contenders: only these of ``CONTENDERS``; one device always trains, as the reference.
        steps: batches of 64 digits. The first few warm up: their seconds and bytes do not count.
        repeats: how often each contender trains.

    Raises:
        ValueError: an unknown contender, no steps, no repeats.
    """
    chosen = choose(contenders)
    check_integer("steps", steps)
    check_integer("repeats", repeats)

    def tell(number: int, name: str) -> None:
        print(f"round {number} of {repeats}: {name}", file=sys.stderr, flush=True)

    return (measure(chosen, steps, repeats, tell=tell) for _ in range(1))


def run_elsewhere(
    contenders: Sequence[str] | None = None, steps: int = 12, repeats: int = 1
) -> ElsewhereResult:
    """``bench_elsewhere`` for a page: fewer steps, one round, nothing printed.

    Raises:
        ValueError: an unknown contender, no steps, no repeats.
    """
    check_integer("steps", steps)
    check_integer("repeats", repeats)
    return measure(choose(contenders), steps, repeats)


def choose(names: Sequence[str] | None) -> dict[str, Contender]:
    """The contenders of these names in the order of ``CONTENDERS``, after one device.

    Raises:
        ValueError: there is no contender of a name.
    """
    for name in names or ():
        check_choice("contender", name, CONTENDERS)
    kept = {ONE_DEVICE, *(CONTENDERS if names is None else names)}
    return {name: contender for name, contender in CONTENDERS.items() if name in kept}


def measure(
    contenders: Mapping[str, Contender],
    steps: int,
    repeats: int,
    *,
    limit_s: float = _LIMIT_S,
    scripts: Path = SCRIPTS,
    tell: Tell = lambda number, name: None,
) -> ElsewhereResult:
    """Train with these contenders in turns, one device first in the first round.

    A contender that fails is out of the later rounds, and its row says why. However this ends, no
    process and no file of it is left.

    Args:
        contenders: by name; one device is among them.
        limit_s: seconds of a turn, after which the contender is ended.
        scripts: the folder with ``experiment.py`` and what is run.
        tell: called before each turn.
    """
    found = {name: Found(contender) for name, contender in contenders.items()}
    for each in found.values():
        each.absent = each.problem = each.contender.why_not()
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_ctrl_c())
        private = tempfile.TemporaryDirectory(prefix="lk-", ignore_cleanup_errors=True)
        place = prepare(Path(stack.enter_context(private)), steps, scripts=scripts)
        for repeat in range(repeats):
            for name in _rotated([name for name in found if not found[name].problem], repeat):
                tell(repeat + 1, name)
                try:
                    turn = found[name].contender.take_turn(place, steps, limit_s)
                except TurnError as error:
                    found[name].problem = str(error)
                else:
                    found[name].turns.append(turn)
    return ElsewhereResult(steps, repeats, found)


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % max(1, len(names))
    return [*names[first:], *names[:first]]
