"""Who reaches whom between the GPUs and network cards of a machine: ``nvidia-smi topo``."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from labkit.units import format_count

# From the shortest way to the longest. SOC is the name that old drivers have for SYS.
WAYS = {
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches, not through the CPU",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "through two PCIe host bridges of one CPU",
    "SYS": "through two CPUs and the link between them",
    "SOC": "through two CPUs and the link between them",
}


class Unanswered(Exception):
    """``nvidia-smi`` gave no answer that can be used; says why in one line."""


@dataclass(frozen=True)
class Topology:
    """Who is connected with whom.

    Attributes:
        links: {(a, b): code}: between GPUs (numbers) and to network cards (names); ``NV4`` stands
            for 4 NVLinks, the other codes are in ``WAYS``.
        cores: the CPU cores next to each GPU, as in ``0-47``.
        nodes: the NUMA node of each GPU.
    """

    links: dict[tuple[int, int | str], str]
    cores: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)

    def pairs(self) -> dict[tuple[int, int], str]:
        """The codes of the pairs a < b of GPUs."""
        found = {(a, b): code for (a, b), code in self.links.items() if isinstance(b, int)}
        return {pair: code for pair, code in sorted(found.items()) if pair[0] < pair[1]}


def nvlinks(code: str) -> int:
    """The number of NVLinks that a code such as ``NV12`` stands for; 0 for any other way."""
    return int(code[2:]) if re.fullmatch(r"NV\d+", code) else 0


def read_topology(text: str) -> Topology:
    """Read the matrix that ``nvidia-smi topo`` prints.

    Raises:
        Unanswered: there is none.
    """
    # The heads are underlined on a terminal.
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    tables = [number for number, line in enumerate(lines) if re.match(r"\s+GPU0\b", line)]
    if not tables:
        raise Unanswered("nvidia-smi topo gives no matrix of GPUs")
    heads = lines[tables[0]].partition("CPU Affinity")[0].split()
    names = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    links: dict[tuple[int, int | str], str] = {}
    cores, nodes = {}, {}
    for line in lines[tables[0] + 1 :]:
        row = re.match(r"\s*GPU(\d+)\s+(\S.*)", line)
        if row is None:
            break
        number, cells = int(row[1]), row[2].split()
        if len(cells) < len(heads):
            raise Unanswered(f"the row of GPU{number} in nvidia-smi's matrix is not whole")
        for head, code in zip(heads, cells):
            gpu = re.fullmatch(r"GPU(\d+)", head)
            if code != "X":
                links[number, int(gpu[1]) if gpu else names.get(head, head)] = code
        cores[number], nodes[number] = [*cells[len(heads) :], "", ""][:2]
    return Topology(links, _known(cores), _known(nodes))


def _known(by_gpu: dict[int, str]) -> dict[int, str]:
    return {gpu: text for gpu, text in by_gpu.items() if re.match(r"\d", text)}


def picture(links: Topology) -> str:
    """The ways between all GPUs, the network cards and CPU cores nearest to each, and a legend."""
    numbers = sorted({a for a, _ in links.links} | set(links.cores))
    if len(numbers) > 16:
        return ""
    # Up to 16 columns fit if their heads are numbers alone.
    width, label = (5, "GPU") if len(numbers) <= 12 else (4, "")
    head = " " * 6 + " ".join(f"{f'{label}{number}':>{width}}" for number in numbers)
    rows = [head.rstrip()]
    for a in numbers:
        cells = [links.links.get((a, b), "-" if a == b else "?") for b in numbers]
        rows.append(f"{f'GPU{a}':<6}" + " ".join(f"{cell:>{width}}" for cell in cells))
    shown = sorted(set(links.pairs().values()), key=length)
    rows += [f"{code:<6} {way(code)}" for code in shown]
    for cores in dict.fromkeys(links.cores.values()):
        near = [gpu for gpu in numbers if links.cores.get(gpu) == cores]
        rows.append(f"CPU cores {cores.replace(',', ', ')}: {spoken(near)}")
    near_cards = {gpu: _nearest(links, gpu) for gpu in numbers}
    for nearest in dict.fromkeys(filter(None, near_cards.values())):
        rows.append(f"{nearest}: {spoken([gpu for gpu in numbers if near_cards[gpu] == nearest])}")
    return "\n".join(rows)


def _nearest(links: Topology, gpu: int) -> str:
    ways = {b: code for (a, b), code in links.links.items() if a == gpu and isinstance(b, str)}
    if not ways:
        return ""
    best = min(ways.values(), key=length)
    if best in ("SYS", "SOC"):
        return "network cards only at another CPU"
    return f"network {', '.join(card for card, code in ways.items() if code == best)} {way(best)}"


def way(code: str) -> str:
    """A code of the matrix in words."""
    if count := nvlinks(code):
        return f"over {format_count(count, 'NVLink')}"
    return WAYS.get(code, f"on a way that nvidia-smi calls {code}")


def length(code: str) -> tuple[int, int]:
    """Sorts codes from the fastest way to the slowest."""
    known = list(WAYS)
    return (0, -nvlinks(code)) if nvlinks(code) else (1, (*known, code).index(code))


def spoken(numbers: Iterable[int]) -> str:
    """``GPU 0``, or ``GPUs 0-2, 5``."""
    numbers = sorted(numbers)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs]
    return f"{'GPUs' if numbers[1:] else 'GPU'} {', '.join(parts)}"
