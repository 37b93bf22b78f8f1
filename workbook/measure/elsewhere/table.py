"""The tables of the one run, made from its record or from a stored one."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.units import format_seconds
from workbook.measure.spread import Spread
from workbook.measure.two_hosts.table import Table

Row = Mapping[str, Any]
_SHOWN_STEPS = 12
_HEADS = (
    *("contender", "processes", "messages", "largest difference"),
    *("sent per step: the kernel", "labkit", "formula", "step"),
)


@dataclass(frozen=True, repr=False)
class NotedTable(Table):
    """A table with sentences below it."""

    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "<br>".join(map(html.escape, self.notes))
        return f"{super()._repr_html_()}<p>{notes}</p>"


def elsewhere_table(record: Mapping[str, Any]) -> NotedTable:
    """One row per contender that has trained; below, why others have not, and the versions.

    The largest difference is that of a loss from one device's; bytes are per process and step.

    Args:
        record: of ``labkit bench elsewhere --json``, of ``run_elsewhere(...).record()`` or of
            ``side_by_side``.
    """
    rows = record["contenders"]
    problems = [f"{row['contender']}: {row['problem']}." for row in rows if row["problem"]]
    cells = tuple(_cells(row) for row in rows if "losses" in row)
    return NotedTable(_HEADS, cells, tuple(problems) + tuple(_versions(rows)))


def losses_table(record: Mapping[str, Any], steps: int = _SHOWN_STEPS) -> Table:
    """One row per contender: the losses of the first steps, before their updates."""
    rows = [row for row in record["contenders"] if "losses" in row]
    shown = min([steps, *(len(row["losses"]) for row in rows)])
    heads = ("loss at step", *map(str, range(shown)))
    cells = ((name_of(row), *(f"{loss:.6f}" for loss in row["losses"][:shown])) for row in rows)
    return Table(heads, tuple(cells))


def name_of(row: Row) -> str:
    """The contender's name, and whether its row is a stored one."""
    return f"{row['contender']} (recorded)" if row.get("recorded") else row["contender"]


def by_role(sent_bytes: Mapping[str, float]) -> dict[str, list[float]]:
    """Bytes by the role of a process: ``worker 0`` and ``worker 1`` are workers."""
    roles: dict[str, list[float]] = {}
    for name, num_bytes in sent_bytes.items():
        roles.setdefault(name.rstrip("0123456789 "), []).append(num_bytes)
    return roles


def difference_words(row: Row) -> str:
    """How far the losses are from one device's, and whether that is more than allowed."""
    difference = row["difference"]
    if difference is None:
        return "not a number"
    if not row["agrees"]:
        return f"{difference:.1e}: wrong, more than {row['tolerance']:.0e}"
    return f"{difference:.1e}" if difference else "0"


def _cells(row: Row) -> tuple[str, ...]:
    roles = by_role(row["sent_bytes"])
    return (
        name_of(row),
        ", ".join(_count(role, len(each)) for role, each in roles.items()),
        row["messages"],
        difference_words(row),
        _bytes_words(row["sent_bytes"]),
        _bytes_words(row["counted_bytes"]),
        _bytes_words(row["formula_bytes"]),
        Spread(**row["step_s"]).text(format_seconds),
    )


def _count(role: str, count: int) -> str:
    return f"{count} {role}" if count == 1 else f"{count} {role}s"


def _bytes_words(sent_bytes: Mapping[str, float]) -> str:
    """Of each role the mean; of workers alone without saying so."""
    means = {role: sum(each) / len(each) for role, each in by_role(sent_bytes).items()}
    if list(means) == ["worker"]:
        return f"{means['worker']:,.0f} B"
    return ", ".join(f"{role} {means[role]:,.0f} B" for role in sorted(means, reverse=True))


def _versions(rows: list[Row]) -> list[str]:
    """A sentence for each set of versions."""
    users: dict[str, list[str]] = {}
    for row in rows:
        if versions := row.get("versions"):
            told = ", ".join(f"{name} {version}" for name, version in versions.items())
            users.setdefault(told, []).append(name_of(row))
    return [f"{told}: {', '.join(names)}." for told, names in users.items()]
