"""The environment variables of this process, which several of its threads may use."""

import os
from collections.abc import Mapping


def variables_now() -> dict[str, str]:
    """A copy of them. (``dict(os.environ)`` fails if another thread removes one meanwhile.)"""
    names = list(os.environ)
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set the environment variables of this process; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
