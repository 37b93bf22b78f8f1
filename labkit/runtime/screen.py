r"""What a rank's output looks like: lines, and bars that overwrite themselves.

``print(..., end="\r")`` and tqdm write a line again and again, and tqdm's nested bars move up and
down between a few lines. Only the last state of such a line counts. So a line that may still be
overwritten stays here, and leaves as soon as it is settled.
"""

import re
from dataclasses import dataclass

# How far up a bar is looked for: a line with as many lines below it is settled.
_ROWS = 8
# A longer line is settled in parts.
MAX_BYTES = 200_000
_ERASE = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K")
_UP = b"\x1b[A"
_SHOWN = re.compile(rb"\x1b\]labkit;(\d{1,9})\x07")
_TOKENS = re.compile(rb"(\n|\r|\x1b\[A|\x1b\[[02]?K|\x1b\]labkit;\d{1,9}\x07)")
# The beginning of one of these sequences, at the end of what has arrived.
_PART = re.compile(rb"\x1b(\[[02]?|\](l|la|lab|labk|labki|labkit|labkit;\d{0,9})?)?\Z")


def marker(number: int) -> bytes:
    """What a rank writes between its lines where its object of this number is to be shown."""
    return b"\x1b]labkit;%d\x07" % number


@dataclass
class _Row:
    text: bytes = b""
    # Whether it was overwritten.
    is_bar: bool = False


class Screen:
    """The last lines of one rank's output, those that may still change."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._at = 0
        # Whether the next text begins the line again.
        self._again = False
        self._has_bars = False
        self._part = b""

    def feed(self, data: bytes) -> list[bytes | int]:
        """Add output; returns the lines that are settled, and numbers of objects to show."""
        data = self._part + data
        self._part = found[0] if (found := _PART.search(data[-24:])) else b""
        data = data[: len(data) - len(self._part)]
        settled: list[bytes | int] = []
        for token in _TOKENS.split(data) if b"\r" in data or b"\x1b" in data else [data]:
            settled += self._write(token)
        return settled

    def _write(self, token: bytes) -> list[bytes | int]:
        if shown := _SHOWN.fullmatch(token):
            return [*self.close(), int(shown[1])]
        if token == b"\r":
            self._again = True
        elif token == _UP:
            self._at, self._has_bars = max(0, self._at - 1), True
        elif token in _ERASE:
            self._rows[self._at] = _Row(is_bar=True)
        elif b"\n" in token:
            return self._write_lines(token)
        elif token:
            self._write_text(token)
            if len(self._rows[self._at].text) > MAX_BYTES:
                return self.close()
        return []

    def _write_text(self, text: bytes) -> None:
        row = self._rows[self._at]
        if self._again:
            row.text, row.is_bar, self._has_bars = text, True, True
        else:
            row.text += text
        self._again = False

    def _write_lines(self, text: bytes) -> list[bytes | int]:
        settled: list[bytes | int] = []
        first, *more = text.split(b"\n")
        if first:
            self._write_text(first)
        for line in more:
            self._at += 1
            self._again = self._at < len(self._rows)
            if not self._again:
                self._rows.append(_Row())
            if line:
                self._write_text(line)
            settled += self._settle(self._at - _ROWS if self._has_bars else self._at)
        return settled

    def _settle(self, above: int) -> list[bytes | int]:
        """Remove and return the lines above this one."""
        above = max(0, above)
        rows, self._rows = self._rows[:above], self._rows[above:]
        self._at -= above
        # A bar that was erased leaves no empty line behind.
        return [row.text for row in rows if not row.is_bar or row.text.strip()]

    def rest(self) -> list[bytes | int]:
        """The lines above the cursor, settled because the rank has been silent for a while."""
        settled = self._settle(self._at)
        self._has_bars = self._has_bars and any(row.text for row in self._rows)
        return settled

    def close(self) -> list[bytes | int]:
        """All lines; the last one may be without an end."""
        rows, self._rows, self._at = self._rows, [_Row()], 0
        self._again = self._has_bars = False
        if not rows[-1].text.strip():
            rows.pop()
        return [row.text for row in rows if not row.is_bar or row.text.strip()]

    def end(self) -> list[bytes | int]:
        """All that is left at the end of the output."""
        part, self._part = self._part, b""
        if part:
            self._write_text(part)
        return self.close()

    @property
    def bars(self) -> list[str]:
        """The bars as they are now."""
        texts = [row.text.decode(errors="replace").strip() for row in self._rows if row.is_bar]
        return [text for text in texts if text]
