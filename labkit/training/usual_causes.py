"""The usual cause of a difference between two layouts of one run, from where it is and how large.

Where the difference is a factor, the same in all parts of a tensor, the factor often tells the
cause: the number of ranks, or of micro-batches.
"""

import math

from labkit.training.recording import Key, Record

# (Power of the number of ranks, the usual cause of a difference by that factor.)
_POWERS = (
    (1, "the number of ranks: means were added, not divided, or added twice and divided once"),
    (-1, "1 / the number of ranks: divided once too often, as a mean over the batch under a mean"),
    (-2, "1 / the number of ranks squared: divided twice too often"),
)
_CAUSES = {
    "start": "the runs start with different values: another seed, or weights that were not loaded",
    "replicas start apart": "the replicas start with different values: rank 0's not broadcast",
    "inputs": "the batches differ: another order of samples, another seed, another share",
    "output": "same inputs and parameters, another output: the mode (train or eval), the dtype, "
    "or statistics of a share (BatchNorm)",
    "random": "random numbers, such as dropout's, are drawn in this step, and another layout "
    "draws others: compare without them (dropout 0)",
    "replicas gradient": "the ranks have different gradients, not summed on all: no_sync, "
    "a module used beside its wrapper, an all-reduce that autograd or a hook does not see",
    "replicas parameter": "the ranks have equal gradients and update differently: optimizer "
    "settings (learning rate) or states that differ by rank, or a parameter frozen on one",
    "rate": "the gradients are equal, so the optimizer is not: its learning rate or schedule",
    "update": "the gradients are equal, so the optimizer is not: weight decay, momentum, a state "
    "that was not restored, or a rule that needs whole matrices",
    "nothing": "nothing arrives: a frozen parameter, a detached output, gradients set to zero",
    "times": "gradients of micro-batches added and not divided, or not set to zero before",
    "part": "divided by a number of micro-batches twice, or only one of them counted",
    "factor": "no number of ranks: a loss divided by the samples of a share in place of the "
    "batch's (padding, ignored targets, a last short batch), another rate, or clipping, which "
    "hides the factor before it",
    "statistics": "no single factor, and the model has BatchNorm: a rank or a micro-batch "
    "normalizes with its own statistics (sync_batch_norm)",
    "weights": "no single factor: shares of unequal weight that count alike (a mean of means over "
    "padded or unequal batches), or clipping before the sum",
}


def factor_of(sums: list[float], others: list[float], tolerance: float) -> float | None:
    """The factor between two lists of several numbers, by least squares, if there is one."""
    largest = max(map(abs, sums))
    if largest == 0 or not all(map(math.isfinite, sums + others)):
        return None
    products = sum(value * other for value, other in zip(sums, others))
    factor = products / sum(value * value for value in sums)
    rest = max(abs(other - factor * value) for value, other in zip(sums, others))
    if rest > tolerance * max(largest, *map(abs, others)):
        return None
    return factor


def usual_cause(
    first: Record, second: Record, key: Key, factor: float | None, replicas_agree: bool
) -> str:
    """The usual cause of a difference in this tensor, by this factor if there is one."""
    if key.step == 0:
        return _CAUSES["start" if replicas_agree else "replicas start apart"]
    if key.name == "inputs":
        return _CAUSES["inputs"]
    draws = Key(key.step, "random", "draws")
    if first.parts(draws) or second.parts(draws):
        return _CAUSES["random"]
    if key.phase == "forward":
        return _CAUSES["output"]
    if not replicas_agree:
        return _CAUSES[f"replicas {key.phase}"]
    has_factor = factor is not None and key.phase != "loss"
    has_gradient = any(other[1:] == ("gradient", key.name) for other in second.keys)
    if key.phase == "parameter" and has_gradient:
        return _CAUSES["rate" if has_factor else "update"]
    if has_factor:
        return _cause_of_factor(factor, second.world_size / first.world_size)
    if any(other.name.endswith("running_mean") for other in second.keys):
        return _CAUSES["statistics"]
    return _CAUSES["weights"]


def _cause_of_factor(factor: float, ratio: float) -> str:
    if abs(factor) < 1e-6:
        return _CAUSES["nothing"]
    for power, cause in _POWERS:
        if ratio != 1 and math.isclose(factor, ratio**power, rel_tol=1e-2):
            return f"the factor {factor:.4g} is {cause}"
    times = max(factor, 1 / factor)
    if times > 1.5 and math.isclose(times, round(times), rel_tol=1e-2):
        name = "times" if factor > 1 else "part"
        return f"a factor of {round(times)}: {_CAUSES[name]}"
    return f"the factor {factor:.4g} is {_CAUSES['factor']}"
