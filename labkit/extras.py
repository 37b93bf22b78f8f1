"""Packages that only some parts need: labkit's extras, and the error where one is absent."""

from importlib.util import find_spec

# Extra in pyproject.toml -> its packages, by the names that are imported.
EXTRAS = {
    "cluster": ("ray",),
    "course": (
        *("anywidget", "filelock", "ipykernel", "IPython", "ipywidgets", "jupyterlab"),
        *("matplotlib", "PIL", "tabulate", "torchvision"),
    ),
    "tensorboard": ("tensorboard",),
}


def extra_of(package: str) -> str | None:
    """Return the extra that brings a package, or None."""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


def absent(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    return [package for package in EXTRAS[extra] if find_spec(package) is None]


def describe_absence(package: str, user: str) -> str:
    """Return the sentence about a package that is not installed, though ``user`` needs it."""
    extra = extra_of(package)
    return (
        f"{user} needs {package}, which is not installed here: labkit's extra {extra} brings it. "
        f"In the clone of labkit run pip install -e '.[{extra}]'"
    )


def require(package: str, user: str) -> None:
    """ValueError if a package of an extra is not installed."""
    if find_spec(package) is None:
        raise ValueError(describe_absence(package, user))
