"""How many GPUs a test needs; with fewer it is skipped, and says so.

``make test`` hides the GPUs, so that all of these tests are skipped; ``make test-gpu`` shows them.
"""

import os

import pytest

from labkit.engine.gpus import num_gpus
from labkit.units import format_count

GPUS = num_gpus()
PRETENDED = bool(os.environ.get("LABKIT_PRETEND_GPUS"))


def gpus(count):
    """Skip a test unless the machine shows ``count`` GPUs that can be used."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "-1"
    told = "has 0, or they are hidden (make test-gpu shows them)" if hidden else f"has {GPUS}"
    reason = f"needs {format_count(count, 'GPU')}, this machine {told}"
    return pytest.mark.skipif(count > GPUS, reason=reason)


# Pretended GPUs have neither a clock nor memory of their own.
real = pytest.mark.skipif(PRETENDED, reason="needs a real GPU, those here are pretended")


def placed(world_size):
    """Each way to give ``world_size`` ranks their GPUs: all share one, or each has its own."""
    shared = ",".join(["cuda:0"] * world_size)
    return [
        pytest.param(shared, id=f"{world_size} ranks share a GPU", marks=gpus(1)),
        pytest.param(
            ",".join(f"cuda:{rank}" for rank in range(world_size)),
            id=f"{world_size} ranks have a GPU each",
            marks=gpus(world_size),
        ),
    ]
