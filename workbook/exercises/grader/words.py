"""The words of every diagnosis: a mistake has an id, and its sentence stands once, in words.toml.

A judge describes what it finds as a ``Mistake``, an id with numbers; only the report turns it into
words. The first part of an id says where it is found: in any exercise (``value``, ``sum``, ``run``
...), or in a particular one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SECTIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
WORDS: dict[str, str] = {
    f"{section}.{key}": sentence
    for section, sentences in _SECTIONS.items()
    for key, sentence in sentences.items()
}


class Mistake:
    """What is wrong: an id, and what its sentence is filled in with.

    Args:
        id: a key of ``WORDS``.
        why: the reason, added after a colon.
        also: further sentences, added after the reason.
        details: the numbers, texts and further mistakes that fill in the names in braces.
    """

    def __init__(self, id: str, why: Found = None, also: Iterable[Found] = (), **details: Any):
        assert id in WORDS, f"no words for the mistake {id!r}"
        self.id, self.why, self.also, self.details = id, why, list(filter(None, also)), details

    def __str__(self) -> str:
        text = WORDS[self.id].format(**self.details) + (f": {self.why}" if self.why else "")
        return text + "".join(f". {more}" for more in self.also)

    def __repr__(self) -> str:
        return f"Mistake({self.id!r}, {str(self)!r})"

    def explain(self, why: Found) -> None:
        """Add ``why`` to the innermost reason that has none yet."""
        if isinstance(self.why, Mistake):
            self.why.explain(why)
        else:
            self.why = self.why or why

    @property
    def ids(self) -> list[str]:
        """The id of this mistake, then those of the mistakes in its details and reasons."""
        inner = [*self.details.values(), self.why, *self.also]
        return [self.id, *(i for one in inner if isinstance(one, Mistake) for i in one.ids)]


# What a judge returns: a mistake, a page's own sentence, or None if nothing is wrong.
Found = Mistake | str | None


def named(key: str) -> Mistake | str:
    """Return the mistake with this id, or ``key`` itself if it is a page's own sentence."""
    return Mistake(key) if key in WORDS else key
