"""Failures on paper: how often to write a checkpoint, and what part of the time is useful.

Symbols: M seconds between failures on average, C for a checkpoint, R from a failure until training
goes on, T of training between two checkpoints.

Sources: Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps" (2006).
"""

import math

from labkit.units import MOST_SECONDS, check_above_zero, check_number


def checkpoint_interval_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Young's interval: the T that loses least, sqrt(2 C M).

    Of each second checkpoints take C / T, and failures lose T / 2 M: half an interval on average.
    The sum is least where the two are equal. It holds for C far below M.
    """
    check_number("checkpoint_s", checkpoint_s, MOST_SECONDS)
    check_above_zero("between_failures_s", between_failures_s, math.inf)
    return math.sqrt(2 * checkpoint_s * between_failures_s)


def goodput(
    interval_s: float, checkpoint_s: float, between_failures_s: float, recovery_s: float
) -> float:
    """The part of the time in which training makes steps that count, from 0 to 1.

    T / (T + C) x (1 - (R + (T + C) / 2) / M): what checkpoints leave, and of it what failures
    leave; each costs the recovery, and half of what lies between two checkpoints.
    """
    check_above_zero("interval_s", interval_s, math.inf)
    check_number("checkpoint_s", checkpoint_s, MOST_SECONDS)
    check_above_zero("between_failures_s", between_failures_s, math.inf)
    check_number("recovery_s", recovery_s, MOST_SECONDS)
    cycle_s = interval_s + checkpoint_s
    lost_s = recovery_s + cycle_s / 2
    return interval_s / cycle_s * max(0.0, 1 - lost_s / between_failures_s)
