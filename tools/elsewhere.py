"""Train the same with labkit, PyTorch, Horovod and TensorFlow, and record it: ``make elsewhere``.

What ``make horovod`` and ``make tensorflow`` have made takes part.
"""

import argparse

from workbook.measure.elsewhere import elsewhere_figure, elsewhere_table, run_elsewhere
from workbook.measure.record import machine, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--steps", type=int, default=40, help="of each contender")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="data/results/elsewhere", help="FILE without its ending")
    given = parser.parse_args()
    found = run_elsewhere(given.contenders, given.steps, given.repeats, tell=print)
    print(elsewhere_table(found))
    how = {"command": "make elsewhere", "config": {"steps": given.steps, "repeats": given.repeats}}
    figures = {f"{given.out}.png": elsewhere_figure(found)}
    write(how | found | machine(), f"{given.out}.json", figures)


if __name__ == "__main__":
    main()
