"""The doctor's checks of GPUs: what ``nvidia-smi`` and a trial of each GPU say, in words.

CUDA is not initialised in this process: GPUs are tried in one of their own (``labkit.gpus``).
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from labkit import gpus
from labkit.runtime import nvidia_smi
from labkit.runtime.gpu_links import Unanswered, length, picture, spoken, way
from labkit.runtime.nvidia_smi import Card
from labkit.units import format_bytes, format_count

# The oldest driver of each CUDA generation: docs.nvidia.com/deploy/cuda-compatibility.
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
# What an idle GPU may hold for the driver itself, and a desktop.
LITTLE_BYTES = 2**30
_NOT_NEEDED = "not needed without a GPU"
_SEE_DRIVER = "runs are the same; what helps is said at the driver above"
_OTHER_BUILD = "make env TORCH=auto"
# What is wrong if nvidia-smi says this, and what helps.
_ADVICE = {
    "version mismatch": "the driver was updated while it ran: restart the machine",
    "communicate with the NVIDIA driver": "install or restart NVIDIA's driver, then try again",
    "Insufficient Permissions": "your user may not open /dev/nvidia*: ask the administrator",
    "determine the device handle": "a GPU has failed: see dmesg, restart the machine",
    "Unknown Error": "in a container: restart it, its access to the GPUs was lost",
    "libnvidia-ml": "in a container: start it with --gpus all; else install NVIDIA's driver",
    "GPU is lost": "restart the machine",
    "no answer": "the driver or a GPU may hang: see dmesg, restart the machine",
    "not installed": "in a container: start it with --gpus all and "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
}


@dataclass(frozen=True)
class Finding:
    """The result of the check ``name``, with advice if something should be changed.

    The status is ``ok``, ``note`` (the course runs, with a limit), or ``stop`` (it does not).
    ``picture`` is printed below as it is.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    picture: str = ""


def check_driver(name: str) -> Finding:
    """The driver, against the CUDA that this PyTorch is built for."""
    import torch

    built = torch.version.cuda
    try:
        machine = nvidia_smi.machine()
        version, cuda, problem = machine.driver, machine.cuda, ""
    except Unanswered as error:
        version, cuda, problem = nvidia_smi.kernel_driver(), "", str(error)
    if problem and not version and not gpus.found().usable:
        if "not installed" in problem:
            return Finding(name, "ok", "none, and not needed without a GPU")
        return Finding(name, "note", problem, _advice(problem))
    found = f"{version or 'a driver of unknown version'}" + (
        f", runs CUDA up to {cuda}" if cuda else ""
    )
    # A trial that went well counts for more than the rule: NVIDIA has packages for old drivers.
    if built and not gpus.found().usable and is_too_old(version, cuda, built):
        oldest = OLDEST_DRIVERS.get(_major(built))
        needs = f" needs {oldest} or newer" if oldest else " is newer"
        found += f"; too old for this PyTorch, whose CUDA {built}{needs}"
        advice = (
            f"{_OTHER_BUILD} takes a build of PyTorch that this driver can run; a newer driver "
        )
        return Finding(name, "note", found, advice + "helps as well. Until then all runs on CPU")
    if built:
        enough = " (one generation is enough)" if cuda and cuda != built else ""
        found += f"; this PyTorch is built for CUDA {built}{enough}"
    if problem:
        return Finding(name, "note", f"{found}; {problem}", _advice(problem))
    return Finding(name, "ok", found)


def is_too_old(version: str, cuda: str, built: str) -> bool:
    """Whether a driver cannot run what is built for CUDA ``built``.

    Within a CUDA generation (12.x) an older driver of that generation runs newer builds.
    """
    if re.match(r"\d", cuda):
        return _major(cuda) < _major(built)
    return bool(version) and _major(version) < OLDEST_DRIVERS.get(_major(built), 0)


def check_gpus(name: str) -> Finding:
    """The GPUs on which a kernel has run, and why others do not count."""
    import torch

    seen = gpus.found()
    kinds = Counter(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in seen.usable)
    found = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if found and not seen.why_not:
        return Finding(name, "ok", found)
    on_cpu = "the whole course runs on CPU"
    if found or seen.why_not:
        others = f"the other {'GPUs are' if found else 'GPUs of this machine are'} left out"
        advice = others if found else f"until then, {on_cpu}"
        return Finding(name, "note", f"{found or 'none'}; {seen.why_not}", advice)
    listed, hidden = _cards(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed and not torch.version.cuda and not torch.version.hip:
        found = f"none, though nvidia-smi lists {len(listed)}: this PyTorch is built without CUDA"
        return Finding(name, "note", found, f"{_OTHER_BUILD} takes a build with CUDA")
    if listed and hidden is not None:
        found = f"none: CUDA_VISIBLE_DEVICES={hidden!r} hides the {len(listed)} that are here"
        return Finding(name, "note", found, f"unset it to use them; without, {on_cpu}")
    if listed:
        found = f"none, though nvidia-smi lists {len(listed)}"
        return Finding(name, "note", found, f"see the driver above; until then, {on_cpu}")
    if nvidia_smi.kernel_driver() or "not installed" not in _problem():
        return Finding(name, "note", "none", f"{on_cpu}; for GPUs, first see the driver above")
    smaller = "; make env TORCH=cpu takes a PyTorch without CUDA, 3 GB less"
    saves = torch.version.cuda and sys.platform == "linux"
    advice = f"{on_cpu}{smaller if saves else ''}. If there should be a GPU, run nvidia-smi"
    return Finding(name, "note", "none", advice)


def check_architectures(name: str) -> Finding:
    """Each card's architecture, against those that this PyTorch holds code for."""
    import torch

    built = torch.cuda.get_arch_list()
    tried = {gpu.name: gpu.capability for gpu in gpus.found().usable}
    asked = nvidia_smi.capabilities() if _cards() else {}
    by_name = {card.name: asked[card.index] for card in _cards() if card.index in asked} or tried
    if not by_name:
        return Finding(name, "ok", _NOT_NEEDED)
    if torch.version.hip or not built:
        made = "ROCm" if torch.version.hip else "the CPU alone"
        return Finding(name, "ok", f"not compared: this PyTorch is built for {made}")
    lacking = [gpu for gpu, one in by_name.items() if not runs_on(one, built)]
    cards = ", ".join(f"{gpu} is sm_{a}{b}" for gpu, (a, b) in by_name.items())
    if not lacking:
        return Finding(name, "ok", f"{cards}; this PyTorch has code for it")
    found = f"{cards}; this PyTorch has code for {', '.join(built)} alone"
    advice = (
        f"nothing runs on {', '.join(lacking)}; {_OTHER_BUILD} takes a build with code for it,"
    )
    return Finding(name, "note", found, f"{advice} if there is one")


def runs_on(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Whether a card runs code that is built for the architectures in ``built``.

    ``sm_86`` is machine code, for that major version and the same or a higher minor one;
    ``compute_80`` is PTX, which the driver translates for any later card. ``sm_90a`` fits 9.0
    alone, ``sm_100f`` its family (CUDA programming guide, compute capabilities).
    """
    for one in built:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", one)
        if parts is None:
            continue
        made_for = int(parts[2]), int(parts[3])
        same_major = made_for[0] == capability[0] and made_for[1] <= capability[1]
        if parts[4] == "a":
            fits = made_for == capability
        elif parts[1] == "compute" and not parts[4]:
            fits = made_for <= capability
        else:
            fits = same_major
        if fits:
            return True
    return False


def check_sharing(name: str) -> Finding:
    """What keeps ranks from a GPU, or from sharing it: modes, slices, other programs."""
    cards, visible = _cards(), _visible()
    if not cards:
        if not gpus.found().usable:
            return Finding(name, "ok", _NOT_NEEDED)
        return Finding(name, "note", f"not known: {_problem()}", _SEE_DRIVER)
    here = [card for card in cards if card.index in visible] if visible else cards
    remarks = [*_modes(here), *_slices(here), *_others(here, visible)]
    if remarks:
        found, advice = zip(*remarks)
        return Finding(name, "note", "; ".join(found), "; ".join(filter(None, advice)))
    found = "no GPU is reserved for one program, and no other programs are on them"
    if any(card.keeps_driver is False for card in here):
        found += "; persistence mode is off: the first program on an idle GPU starts seconds later"
    return Finding(name, "ok", found)


def _modes(cards: Iterable[Card]) -> list[tuple[str, str]]:
    strict = [card.index for card in cards if "exclusive" in card.compute_mode.lower()]
    closed = [card.index for card in cards if card.compute_mode == "Prohibited"]
    numbers = ",".join(map(str, sorted(strict + closed)))
    reset = f"an administrator changes the mode with: nvidia-smi -i {numbers} -c DEFAULT"
    remarks = []
    if strict:
        text = (
            f"{spoken(strict)}: exclusive mode, one process at a time, so ranks cannot share one"
        )
        remarks.append((text, reset))
    if closed:
        text = f"{spoken(closed)}: compute mode Prohibited, so nothing runs there"
        remarks.append((text, "" if strict else reset))
    return remarks


def _slices(cards: Iterable[Card]) -> list[tuple[str, str]]:
    remarks = []
    for card in cards:
        if card.mig_slices is not None:
            slices = format_count(card.mig_slices, "slice") if card.mig_slices else "no slices yet"
            use = "a process sees one slice only, ranks share it, and slices are not linked"
            use = use if card.mig_slices else "nothing runs there"
            switch = f"nvidia-smi -i {card.index} -mig 0"
            off = f"an administrator gives the whole GPU back with: {switch}"
            remarks.append((f"{spoken([card.index])}: MIG is on ({slices}); {use}", off))
    return remarks


def _others(cards: Iterable[Card], visible: dict[int, int]) -> list[tuple[str, str]]:
    """GPUs that other programs use: this process and its ranks have none of their memory yet."""
    cards = [card for card in cards if card.mig_slices is None]
    busy = [card for card in cards if card.programs or (card.used_bytes or 0) > LITTLE_BYTES]
    remarks = []
    for card in busy:
        by = (
            f"by {format_count(card.programs, 'program')}" if card.programs else "by programs that"
        )
        by += "" if card.programs else " this container or user does not see"
        used = "memory" if card.used_bytes is None else format_bytes(card.used_bytes)
        total = f" of {format_bytes(card.memory_bytes)}" if card.memory_bytes else ""
        remarks.append((f"{spoken([card.index])}: {used}{total} in use {by}", ""))
    usable = {gpu.index for gpu in gpus.found().usable}
    free = [f"cuda:{visible[card.index]}" for card in cards if card not in busy and visible]
    free = [gpu for gpu in free if int(gpu.partition(":")[2]) in usable]
    if busy and free:
        remarks[0] = (remarks[0][0], f"free ones are chosen with --devices {','.join(free)}")
    elif busy:
        remarks[0] = (
            remarks[0][0],
            "times are not those of a free GPU, and memory may not suffice",
        )
    return remarks


def check_links(name: str) -> Finding:
    """Who reaches whom on which way, with a picture."""
    if len(gpus.found().usable) < 2 and len(_cards()) < 2:
        return Finding(name, "ok", "not needed with fewer than two GPUs")
    try:
        links = nvidia_smi.topology()
    except Unanswered as error:
        return Finding(name, "note", f"not known: {error}", _SEE_DRIVER)
    pairs = links.pairs()
    counts = Counter(pairs.values())
    ways = [
        f"{_of_pairs(count, len(pairs))} {way(code)}"
        for code, count in sorted(counts.items(), key=lambda item: length(item[0]))
    ]
    found, advice = "; ".join(ways), []
    lacking, why = _without_peer_access()
    if lacking:
        told = _of_pairs(lacking, len(pairs))
        found += f"; on {told} they cannot read each other's memory ({why})"
        advice.append("results are the same: copies go through host memory, and take longer")
    usable = {gpu.index for gpu in gpus.found().usable}
    visible = {card: n for card, n in _visible().items() if n in usable}
    mine = {pair: code for pair, code in pairs.items() if set(pair) <= set(visible)}
    if len(set(mine.values())) > 1:
        names = ",".join(
            f"cuda:{visible[gpu]}" for gpu in min(mine, key=lambda p: length(mine[p]))
        )
        advice.append(f"two ranks are fastest on a pair with the best link: --devices {names}")
    drawn = "\n".join(filter(None, [picture(links), _numbering()]))
    return Finding(name, "note" if lacking else "ok", found, "; ".join(advice), drawn)


def _of_pairs(count: int, total: int) -> str:
    return "every pair" if count == total else f"{count} of {total} pairs"


def _numbering() -> str:
    visible = _visible()
    if not visible:
        order = "are so with CUDA_DEVICE_ORDER=PCI_BUS_ID"
        return f"the numbers are nvidia-smi's; those of cuda:0, cuda:1, ... {order}"
    if all(card == number for card, number in visible.items()) and len(visible) == len(_cards()):
        return ""
    return "here " + ", ".join(f"cuda:{n} is GPU{card}" for card, n in visible.items())


def _without_peer_access() -> tuple[int, str]:
    """(the number of pairs without peer access, why)."""
    said = {
        "CNS": "the chipset cannot",
        "GNS": "this kind of GPU cannot",
        "TNS": "not on this way",
        "DR": "switched off in the driver",
        "NS": "not supported",
    }
    try:
        codes = [code for code in nvidia_smi.peer_access().values() if code in said]
    except Unanswered:
        return 0, ""
    return len(codes), ", ".join(said[code] for code in dict.fromkeys(codes))


def check_nccl(name: str) -> Finding:
    import torch

    count = len(gpus.found().usable)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        number = ".".join(map(str, torch.cuda.nccl.version()))
        use = f"takes one rank per GPU: up to {count} here" if count else "not used here"
        return Finding(name, "ok", f"{number}; {use}")
    if count:
        found = "not in this PyTorch, though there are GPUs: ranks on GPUs talk over gloo"
        return Finding(name, "note", found, f"{_OTHER_BUILD} takes a build with NCCL (on Linux)")
    return Finding(name, "ok", "not in this PyTorch, and not needed without a GPU")


def _problem() -> str:
    """Why nvidia-smi does not answer; empty if it does."""
    try:
        nvidia_smi.machine()
    except Unanswered as error:
        return str(error)
    return ""


def _cards() -> tuple[Card, ...]:
    try:
        return nvidia_smi.machine().cards
    except Unanswered:
        return ()


def _visible() -> dict[int, int]:
    """{nvidia-smi's number: N of ``cuda:N``}; empty where it cannot be told.

    CUDA puts the fastest card first, so the numbers agree only where all cards are of one kind,
    or where CUDA_DEVICE_ORDER says so.
    """
    cards = _cards()
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if any(card.mig_slices is not None for card in cards):
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [str(card.index) for card in cards] if listed is None else listed.split(",")
    found = {}
    for position, word in enumerate(map(str.strip, chosen)):
        near = [
            card.index
            for card in cards
            if (card.uuid.startswith(word) if word.startswith("GPU-") else str(card.index) == word)
        ]
        numbered = not word.startswith("GPU-")
        if not near or (numbered and not by_bus and len({card.name for card in cards}) > 1):
            return {} if near else found
        found[near[0]] = position
    return found


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _advice(problem: str) -> str:
    return next(
        (advice for words, advice in _ADVICE.items() if words in problem), "run nvidia-smi"
    )
