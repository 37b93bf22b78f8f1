"""The page of a report: one file, from the files of its folder and the CPU records."""

import base64
import contextlib
import html
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.files import write_atomically
from labkit.units import format_count, format_seconds
from workbook.measure.gpu_report.folder import DONE, NOT_REACHED, SKIPPED, Folder, State
from workbook.measure.gpu_report.tables import BENCHES, Cell, Number, Table, beside, placements
from workbook.measure.record import machine

# Longer tables are folded.
_OPEN_ROWS = 24
_LOG_LINES = 400
_QUICK = '<p class="failed">Made with --quick, to try the report: its times mean nothing.</p>'
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bad: #c2410c; --good: #15803d; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.875rem; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); }
tbody tr:nth-child(even) { background: var(--soft); }
pre { overflow-x: auto; background: var(--soft); padding: 0.75rem; font-size: 0.8rem; }
img { max-width: 100%; height: auto; background: white; } figure { margin: 1rem 0; }
.done { color: var(--good); } .failed { color: var(--bad); font-weight: 600; }
.note, figcaption { font-size: 0.9rem; opacity: 0.85; } summary { cursor: pointer; }
nav a { margin-right: 1rem; white-space: nowrap; }
"""


def write_page(folder: Folder, states: list[State], root: Path, *, quick: bool = False) -> None:
    """Write ``report.json`` and ``index.html`` from what the folder holds now.

    ``quick``: the page says that its times mean nothing.
    """
    report = {"machine": machine(), "steps": [asdict(state) for state in states]}
    write_atomically(folder.path / "report.json", json.dumps(report, indent=1) + "\n")
    page = _page(folder, states, root, report["machine"], _QUICK if quick else "")
    write_atomically(folder.path / "index.html", page)


def _page(
    folder: Folder, states: list[State], root: Path, found: dict[str, Any], told: str
) -> str:
    measured = [state for state in states if state.status not in (SKIPPED, NOT_REACHED)]
    notebooks = [state for state in measured if state.name.startswith("notebook-")]
    sections = [(s, _section(folder, s, root)) for s in measured if s not in notebooks]
    links = [f'<a href="#{state.name}">{_escaped(state.title)}</a>' for state, _ in sections]
    body = "".join(text for _, text in sections)
    if notebooks:
        links.append('<a href="#notebooks">Notebooks</a>')
        body += _notebooks(folder, notebooks)
    gpus = found["hardware"]["gpus"]
    title = f"labkit on {_named(gpus)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{_escaped(title)}</h1>{told}{_summary(states)}{_machine(found)}"
        f"<nav>{' '.join(links)}</nav>{_steps(states)}{body}</body></html>\n"
    )


def _named(gpus: list[str]) -> str:
    kinds = {name: gpus.count(name) for name in gpus}
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "GPUs"


def _summary(states: list[State]) -> str:
    done = sum(state.status == DONE for state in states)
    runnable = [state for state in states if state.status != SKIPPED]
    others = {s.status for s in runnable if s.status != DONE}
    counts = [f"{sum(s.status == one for s in runnable)} {one}" for one in sorted(others)]
    told = ", ".join([f"{done} of {format_count(len(runnable), 'step')} done", *counts])
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    took = format_seconds(sum(state.seconds for state in states))
    return f"<p>{told}. Written {now}; the steps took {took}.</p>"


def _machine(found: dict[str, Any]) -> str:
    hardware, versions = found["hardware"], found["versions"]
    cells: list[list[Cell]] = [["GPUs", _named(hardware["gpus"])]]
    cells += [[name, str(value)] for name, value in hardware.items() if name != "gpus"]
    cells += [[name, str(value)] for name, value in versions.items()]
    return _table(Table("", ["", "this machine"], cells))


def _steps(states: list[State]) -> str:
    rows = "".join(
        f"<tr><td>{_escaped(state.title)}</td>"
        f'<td class="{"done" if state.status == DONE else "failed"}">{state.status}</td>'
        f'<td class="number">{format_seconds(state.seconds) if state.seconds else ""}</td>'
        f"<td>{state.ended.partition('+')[0]}</td><td>{_escaped(state.told)}</td></tr>"
        for state in states
    )
    heads = "".join(f"<th>{head}</th>" for head in ("step", "", "took", "ended (UTC)", "why"))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h2>Steps</h2><div class="scroll">{table}</div>'


def _section(folder: Folder, state: State, root: Path) -> str:
    head = f'<section id="{state.name}"><h2>{_escaped(state.title)}</h2>'
    if state.status != DONE:
        head += f'<p class="failed">{state.status}: {_escaped(state.told)}</p>'
    return head + "".join(_content(folder, state, root)) + "</section>"


def _content(folder: Folder, state: State, root: Path) -> Iterable[str]:
    place, log = folder.steps / state.name, folder.log(state.name)
    result = folder.result(state.name)
    yield from (_figure(path, state) for path in sorted(place.glob("*.png")))
    if state.name == "placements":
        yield from map(_table, placements(result))
    elif state.name in BENCHES and result:
        yield _sharing(result)
        yield _table(beside(state.name, result, _cpu_record(root, state.name)))
    elif state.name == "tests":
        yield _tests(place / "tests.xml")
    is_open = " open" if state.name == "doctor" or state.status != DONE else ""
    lines = "\n".join(log.splitlines()[-_LOG_LINES:])
    if lines:
        printed = f"<summary>What it printed</summary><pre>{_escaped(lines)}</pre>"
        yield f"<details{is_open}>{printed}</details>"


def _sharing(record: dict[str, Any]) -> str:
    rows = [row for row in record.get("ranks", []) if row["share_a_gpu"]]
    if not rows:
        return ""
    sizes = " and ".join(str(row["world_size"]) for row in rows)
    return f"<p>{sizes} ranks share a GPU here: their times are not those of more GPUs.</p>"


def _cpu_record(root: Path, name: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((root / "data" / "results" / BENCHES[name].cpu_file).read_text())
    return {}


def _figure(path: Path, state: State) -> str:
    told = path.with_suffix(".txt")
    name = f"{state.title}: {path.stem.replace('_', ' ')}"
    alt, _, caption = (
        told.read_text().strip().partition("\n")
        if told.exists()
        else (f"{name}. Its numbers are in the table below.", "", name)
    )
    picture = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{_escaped(alt)}" width="850" src="data:image/png;base64,{picture}">'
        f"<figcaption>{_escaped(caption)}</figcaption></figure>"
    )


def _tests(path: Path) -> str:
    """The counts, the failed tests, and the reasons of those that were skipped."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return "<p>The tests have left no result.</p>"
    rows: list[list[Cell]] = []
    counts = {"failed": 0, "skipped": 0}
    for case in cases:
        for kind, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",))):
            reasons = [one.get("message", "") for tag in tags for one in case.findall(tag)]
            counts[kind] += bool(reasons)
            for reason in reasons:
                first_line = reason.splitlines()[0] if reason else ""
                rows.append([case.get("name", ""), kind, first_line])
    passed = len(cases) - sum(counts.values())
    told = f"<p>{passed} passed, {counts['failed']} failed, {counts['skipped']} skipped.</p>"
    return told + (_table(Table("", ["test", "", "why"], rows)) if rows else "")


def _notebooks(folder: Folder, states: list[State]) -> str:
    rows = ""
    for state in states:
        result = folder.result(state.name)
        path = f"steps/{state.name}/{state.title}"
        link = f'<a href="{html.escape(path)}">{_escaped(state.title)}</a>'
        errors = "; ".join(
            f"cell {row['cell']}: {row['error']}" for row in result.get("errors", [])
        )
        status = "done" if state.status == DONE else "failed"
        rows += (
            f'<tr><td>{link if result else _escaped(state.title)}</td><td class="{status}">'
            f'{state.status}</td><td class="number">{result.get("cells", "")}</td>'
            f'<td class="number">{format_seconds(state.seconds)}</td>'
            f"<td>{_escaped((errors or state.told)[:600])}</td></tr>"
        )
    heads = "".join(f"<th>{one}</th>" for one in ("notebook", "", "cells", "took", "errors"))
    return (
        '<section id="notebooks"><h2>Notebooks</h2><p>Run on the GPUs and stored in this folder; '
        "those of the workbook are as they were.</p>"
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></section>"
    )


def _table(table: Table) -> str:
    heads = "".join(f"<th>{_escaped(head)}</th>" for head in table.heads)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    text = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    text = f'<div class="scroll">{text}</div>'
    if len(table.rows) > _OPEN_ROWS:
        text = (
            f"<details><summary>{format_count(len(table.rows), 'row')}</summary>{text}</details>"
        )
    title = f"<h3>{_escaped(table.title)}</h3>" if table.title else ""
    note = f'<p class="note">{_escaped(table.note)}</p>' if table.note else ""
    return title + text + note


def _cell(cell: Cell) -> str:
    if isinstance(cell, Number):
        return f'<td class="number" data-value="{cell.value!r}">{_escaped(cell.text)}</td>'
    return f"<td>{_escaped(cell)}</td>"


def _escaped(text: str) -> str:
    return html.escape(text)
