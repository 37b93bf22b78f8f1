"""The states of all random number generators of a process, as tensors, and back."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

States = dict[str, Tensor]


def random_states(devices: Iterable[torch.device]) -> States:
    """The states of torch's generators (host and these GPUs), of ``random``, and of NumPy's."""
    version, words, gauss = random.getstate()
    assert version == 3, "the format since Python 3.2"
    state: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = state
    gpus = [torch.cuda.get_rng_state(device) for device in _gpus(devices)]
    return {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_gauss": _maybe(gauss),
        "numpy": torch.tensor([*keys.tolist(), position]),
        "numpy_gauss": _maybe(cached if has_gauss else None),
        **{f"cuda_{place}": state for place, state in enumerate(gpus)},
    }


def set_random_states(states: Mapping[str, Tensor], devices: Iterable[torch.device]) -> None:
    """Continue with the random numbers that followed ``random_states``.

    The n-th GPU here gets the state of the n-th there; one that had none is left as it is.
    """
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position = states["numpy"].tolist()
    cached = states["numpy_gauss"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, np.uint32), position, len(cached), *(cached or [0.0]))
    )
    for place, device in enumerate(_gpus(devices)):
        if (state := states.get(f"cuda_{place}")) is not None:
            torch.cuda.set_rng_state(state, device)


def equal_states(states: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether no random number was drawn between the two."""
    return all(torch.equal(state, others[name]) for name, state in states.items())


def _maybe(number: float | None) -> Tensor:
    """[1] or, for None, [0]: the second of a pair of normal numbers, if it is kept for later."""
    return torch.tensor([] if number is None else [number], dtype=torch.float64)


def _gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]
