"""The environments of other frameworks, each with packages that do not go together with ours.

``make horovod`` makes .venv-horovod, ``make tensorflow`` makes .venv-tensorflow. The stamp
``.ready`` is written last, by other_framework.py: the folder that it was made in, since no
environment works from another place, and the SHA-256 of the pins it was made from.
"""

import hashlib
from pathlib import Path

FRAMEWORKS = ("horovod", "tensorflow")
REPOSITORY = Path(__file__).resolve().parents[1]


def environment_of(framework: str, repository: Path = REPOSITORY) -> Path:
    """The folder of a framework's environment, which may not be there."""
    return repository / f".venv-{framework}"


def why_not(framework: str, repository: Path = REPOSITORY) -> str:
    """Say why a framework cannot be used here, and what to run; empty if it can."""
    folder = environment_of(framework, repository)
    try:
        made = (folder / ".ready").read_text().splitlines() == stamp(framework, repository)
    except OSError:
        made = False
    if made and (folder / "bin" / "python").exists():
        return ""
    return f"{framework} needs its own environment: make {framework}"


def stamp(framework: str, repository: Path = REPOSITORY) -> list[str]:
    """The lines of ``.ready``: where the environment really is, the SHA-256 of its pins."""
    pins = (repository / "tools" / f"{framework}.txt").read_bytes()
    folder = environment_of(framework, repository).resolve()
    return [str(folder), hashlib.sha256(pins).hexdigest()]
