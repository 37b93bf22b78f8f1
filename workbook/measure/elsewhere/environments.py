"""The environments of other frameworks, each with packages that do not go together with ours.

``make horovod`` makes .venv-horovod, ``make tensorflow`` makes .venv-tensorflow. The stamp
``.ready`` is written last, by tools/other_framework.py: the folder that it was made in, since no
environment works from another place, and the SHA-256 of the pins it was made from.
"""

import hashlib
from importlib import metadata
from pathlib import Path

FRAMEWORKS = ("horovod", "tensorflow")
REPOSITORY = Path(__file__).resolve().parents[3]


def python_of(framework: str, repository: Path = REPOSITORY) -> Path | None:
    """The Python of a framework's environment, None if that is not complete (see ``why_not``)."""
    if why_not(framework, repository):
        return None
    return environment_of(framework, repository) / "bin" / "python"


def why_not(framework: str, repository: Path = REPOSITORY) -> str:
    """Why a framework cannot be used here, and what to run: one sentence, empty if it can."""
    folder, to_run = environment_of(framework, repository), f"make {framework}"
    if not pins_of(framework, repository).is_file():
        return f"{framework} needs an environment of its own, which {to_run} makes in a clone"
    if not folder.is_dir():
        return f"{framework} needs an environment of its own: {to_run}"
    try:
        found = (folder / ".ready").read_text().splitlines()
    except OSError:
        return f"{folder.name} is not complete: {to_run}"
    made_in, made_from = stamp(framework, repository)
    if found[:1] != [made_in] or not (folder / "bin" / "python").exists():
        return f"{folder.name} was made in another folder, or has lost its Python: {to_run}"
    if found[1:] != [made_from]:
        return f"{folder.name} has other versions than tools/{framework}.txt: {to_run}"
    return ""


def version_in(framework: str, package: str, repository: Path = REPOSITORY) -> str:
    """The version of a package in a framework's environment; empty if it is not there."""
    packages = environment_of(framework, repository).glob("lib/python3*/site-packages")
    found = metadata.distributions(name=package, path=list(map(str, packages)))
    return next((each.version for each in found), "")


def stamp(framework: str, repository: Path = REPOSITORY) -> list[str]:
    """The lines of ``.ready``: where the environment really is, the SHA-256 of its pins."""
    pins = pins_of(framework, repository).read_bytes()
    folder = environment_of(framework, repository).resolve()
    return [str(folder), hashlib.sha256(pins).hexdigest()]


def environment_of(framework: str, repository: Path = REPOSITORY) -> Path:
    """The folder of a framework's environment, which may not be there.

    Raises:
        ValueError: no framework of this name has one.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"{framework!r} is not one of {', '.join(FRAMEWORKS)}")
    return repository / f".venv-{framework}"


def pins_of(framework: str, repository: Path = REPOSITORY) -> Path:
    """The file with the versions, and the hashes of their files."""
    return repository / "tools" / f"{framework}.txt"
