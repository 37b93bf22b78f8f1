"""The pages of the course in one table, and every place that shows it.

``python tools/course_map.py`` writes the map in README, and on each page the links to the previous
and the next page, and along the short path.
"""

import re
from pathlib import Path

import nbformat

from labkit.engine.files import write_atomically
from workbook.notebook.pages import SHORT_PATH

ROOT = Path(__file__).resolve().parents[1]
# In reading order: {page: (name, the question that it answers)}
PAGES = {
    "00_start_here": (
        "start here",
        "How does a function in a cell run on four processes, and what if they all wait?",
    ),
    "01_one_device": ("one device", "Where does the time of a training step go?"),
    "02_data_parallel": ("data parallel", "What does one process with many devices cost?"),
    "03_distributed_data_parallel": (
        "distributed data parallel",
        "How is communication hidden behind the backward pass?",
    ),
    "04_parameter_server": ("parameter server", "What does a central server cost?"),
    "05_async_parameter_server": (
        "asynchronous parameter server",
        "What is gained when no worker waits for another, and at what price?",
    ),
    "06_ring_all_reduce": (
        "ring all-reduce",
        "How can all ranks sum their gradients with no rank in the middle?",
    ),
    "07_your_ring_under_ddp": (
        "your ring under DDP",
        "Can your own ring train under PyTorch's DDP?",
    ),
    "08_layer_placement": (
        "layer placement",
        "Where do you cut a model that is too large for one device, and what does each cut cost?",
    ),
    "09_pipeline": (
        "pipeline",
        "A model is cut into stages: how can all of them work at the same time?",
    ),
    "10_tensor_parallel": ("tensor parallel", "How is one layer split over devices?"),
    "11_sharded_data_parallel": (
        "sharded data parallel",
        "How do ranks share parameters, gradients and optimizer state that fit on none of them?",
    ),
    "12_mesh": (
        "mesh",
        "Data, pipeline and tensor parallelism at once: which rank sums what with which others?",
    ),
    "13_experts": (
        "experts",
        "Each token needs only some of a layer's parameters: which rank has them?",
    ),
    "14_many_machines": ("many machines", "How do several machines train one model?"),
    "15_detective_cases": (
        "detective cases",
        "A job on many ranks fails or learns badly: which rank, which line, what cause?",
    ),
    "16_choosing": ("choosing", "Which technique suits a model and its machines?"),
    "17_seventy_times": (
        "seventy times",
        "How can a benchmark make a ring look 70 times faster than DDP?",
    ),
    "18_the_same_elsewhere": (
        "the same elsewhere",
        "What is each technique called in Horovod, TensorFlow and others, and is it the same?",
    ),
    "19_puzzles": (
        "puzzles",
        "In how few rounds, bytes or spare memory can you solve ten small puzzles?",
    ),
}
_TABLE = re.compile(r"\| page \|.*\n(\|.*(\n|$))+")
_NEIGHBORS = re.compile(r"\| (Previous|Next|Short path) \|.*(\n|$)")
_LAST_RUN = re.compile(r"(\| Last run on \|.*\n)")


def course_map(folder: str = "") -> str:
    """Return the table in Markdown, for README, with the pages in ``folder``."""
    lines = ["| page | short path | what it answers |", "|---|---|---|"]
    for stem, (_, question) in PAGES.items():
        step = ""
        if stem in SHORT_PATH:
            step = str(SHORT_PATH.index(stem) + 1)
        lines.append(f"| {_link(stem, folder)} | {step} | {question} |")
    return "\n".join(lines) + "\n"


def neighbors(stem: str) -> str:
    """Return the rows of a page's head that link to its neighbors, and along the short path."""
    pages = list(PAGES)
    number = pages.index(stem)
    rows = ""
    if number > 0:
        rows += f"| Previous | {_link(pages[number - 1])} |\n"
    if number + 1 < len(pages):
        rows += f"| Next | {_link(pages[number + 1])} |\n"
    if stem not in SHORT_PATH:
        return rows + "| Short path | not on it: this page is optional |\n"
    step = SHORT_PATH.index(stem) + 1
    text = f"step {step} of {len(SHORT_PATH)}"
    if step < len(SHORT_PATH):
        text += f"; next on it: {_link(SHORT_PATH[step])}"
    return rows + f"| Short path | {text} |\n"


def _link(stem: str, folder: str = "") -> str:
    return f"[{stem[:2]} {PAGES[stem][0]}]({folder}{stem}.ipynb)"


def replaced(pattern: re.Pattern[str], new: str, text: str) -> str:
    """``text`` with the one place that the pattern finds replaced; ValueError if it is not one."""
    changed, count = pattern.subn(lambda found: new, text)
    if count != 1:
        raise ValueError(f"{count} places like {pattern.pattern}, where one is needed")
    return changed


def files() -> dict[Path, str]:
    """The text that each file with the table should have, by path."""
    readme = ROOT / "README.md"
    found = {readme: replaced(_TABLE, course_map("notebooks/"), readme.read_text())}
    for stem in PAGES:
        path = ROOT / "notebooks" / f"{stem}.ipynb"
        page = nbformat.read(path, as_version=4)
        head = _NEIGHBORS.sub("", page.cells[0].source + "\n")
        row = _LAST_RUN.search(head)
        rows = (row[0] if row else "") + neighbors(stem)
        page.cells[0].source = replaced(_LAST_RUN, rows, head).removesuffix("\n")
        found[path] = nbformat.writes(page).rstrip("\n") + "\n"
    return found


def main() -> None:
    for path, text in files().items():
        if path.read_text() != text:
            write_atomically(path, text)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
