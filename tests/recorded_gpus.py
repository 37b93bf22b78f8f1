"""Machines as their ``nvidia-smi`` answers, shortened; tabs and escape codes as it prints them."""

import re
import stat
from pathlib import Path

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def process(pid, used, kind="C", name="python"):
    return (
        f"<process_info><gpu_instance_id>N/A</gpu_instance_id><pid>{pid}</pid><type>{kind}</type>"
        f"<process_name>{name}</process_name><used_memory>{used} MiB</used_memory></process_info>"
    )


def gpu(
    name,
    total,
    used,
    mode="Default",
    persistence="Enabled",
    mig="N/A",
    slices="None",
    running="",
    uuid="GPU-0",
):
    mig_part = (
        f"<mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>"
        f"<mig_devices>{slices}</mig_devices>"
        if mig
        else ""
    )
    return f"""\t<gpu id="00000000:07:00.0">
\t\t<product_name>{name}</product_name>
\t\t<persistence_mode>{persistence}</persistence_mode>
\t\t{mig_part}
\t\t<serial>N/A</serial>
\t\t<uuid>{uuid}</uuid>
\t\t<minor_number>0</minor_number>
\t\t<fb_memory_usage>
\t\t\t<total>{total}</total>
\t\t\t<reserved>622 MiB</reserved>
\t\t\t<used>{used}</used>
\t\t</fb_memory_usage>
\t\t<bar1_memory_usage><total>131072 MiB</total><used>1 MiB</used></bar1_memory_usage>
\t\t<compute_mode>{mode}</compute_mode>
\t\t<processes>{running}
\t\t</processes>
\t</gpu>"""


def log(driver, cuda, *gpus):
    told = f"\t<cuda_version>{cuda}</cuda_version>\n" if cuda else ""
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
        "<nvidia_smi_log>\n\t<timestamp>Wed Oct 15 10:41:09 2025</timestamp>\n"
        f"\t<driver_version>{driver}</driver_version>\n{told}"
        f"\t<attached_gpus>{len(gpus)}</attached_gpus>\n"
        + "\n".join(gpus)
        + "\n</nvidia_smi_log>\n"
    )


def slice_of(index):
    return (
        f"<mig_device><index>{index}</index><gpu_instance_id>{index + 1}</gpu_instance_id>"
        "<fb_memory_usage><total>20096 MiB</total><used>107 MiB</used></fb_memory_usage>"
        "</mig_device>"
    )


def matrix(rows, end="\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"):
    """As printed: tabs, and heads that are underlined by escape codes."""
    names = [row.split()[0] for row in rows]
    others = [f"NIC{i}" for i in range(len(rows[0].split()) - 1 - 3 * bool(end) - len(rows))]
    heads = "\t".join([*names, *others])
    body = [re.sub(r" +", "\t", row) for row in rows]
    return "\n".join([f"\t\x1b[4m{heads}{end}\x1b[0m", *body]) + "\n"


A100 = "NVIDIA A100-SXM4-80GB"
DGX = {
    "-q -x": log(
        "580.65.06",
        "13.0",
        *[gpu(A100, "81920 MiB", "4 MiB", mig="Disabled", uuid=f"GPU-{i}{i}") for i in range(8)],
    ),
    "--query-gpu=index,compute_cap --format=csv,noheader": "".join(
        f"{i}, 8.0\n" for i in range(8)
    ),
    "topo -m": matrix(
        [
            "GPU0 X NV12 NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS 48-63,176-191 3 N/A",
            "GPU1 NV12 X NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS 48-63,176-191 3 N/A",
            "GPU2 NV12 NV12 X NV12 NV12 NV12 NV12 NV12 SYS SYS SYS SYS 16-31,144-159 1 N/A",
            "GPU3 NV12 NV12 NV12 X NV12 NV12 NV12 NV12 SYS SYS SYS SYS 16-31,144-159 1 N/A",
            "GPU4 NV12 NV12 NV12 NV12 X NV12 NV12 NV12 SYS SYS PXB PIX 112-127,240-255 7 N/A",
            "GPU5 NV12 NV12 NV12 NV12 NV12 X NV12 NV12 SYS SYS PXB PIX 112-127,240-255 7 N/A",
            "GPU6 NV12 NV12 NV12 NV12 NV12 NV12 X NV12 SYS SYS SYS SYS 80-95,208-223 5 N/A",
            "GPU7 NV12 NV12 NV12 NV12 NV12 NV12 NV12 X SYS SYS SYS SYS 80-95,208-223 5 N/A",
        ]
    )
    + "NIC0\tPXB\tPXB\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \tPXB\tSYS\tSYS\n"
    + LEGEND
    + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n  NIC2: mlx5_2\n  NIC3: mlx5_3\n\n",
    "topo -p2p r": matrix(
        [" ".join([f"GPU{a}", *("X" if a == b else "OK" for b in range(8))]) for a in range(8)],
        end="",
    ),
}
# As four V100 are wired: a pair has two NVLinks, one, or none.
FOUR_V100 = {
    "-q -x": log(
        "535.183.01", "12.2", *[gpu("Tesla V100-SXM2-16GB", "16384 MiB", "0 MiB") for _ in "0123"]
    ),
    "--query-gpu=index,compute_cap --format=csv,noheader": "0, 7.0\n1, 7.0\n2, 7.0\n3, 7.0\n",
    "topo -m": matrix(
        [
            "GPU0 X NV1 NV2 SYS 0-19,40-59 0 N/A",
            "GPU1 NV1 X SYS NV2 0-19,40-59 0 N/A",
            "GPU2 NV2 SYS X NV1 20-39,60-79 1 N/A",
            "GPU3 SYS NV2 NV1 X 20-39,60-79 1 N/A",
        ]
    )
    + LEGEND,
    "topo -p2p r": matrix(
        ["GPU0 X OK OK TNS", "GPU1 OK X TNS OK", "GPU2 OK TNS X OK", "GPU3 TNS OK OK X"], end=""
    ),
}
PCIE = {
    "-q -x": log(
        "590.44.01",
        "13.1",
        gpu(
            "NVIDIA GeForce RTX 5090",
            "32607 MiB",
            "31022 MiB",
            persistence="Disabled",
            running=process(2211, 30720) + process(2212, 256) + process(1400, 40, "G", "Xorg"),
        ),
        gpu("NVIDIA GeForce RTX 5090", "32607 MiB", "15 MiB", persistence="Disabled"),
    ),
    "--query-gpu=index,compute_cap --format=csv,noheader": "0, 12.0\n1, 12.0\n",
    "topo -m": matrix(["GPU0 X PHB 0-63 0 N/A", "GPU1 PHB X 0-63 0 N/A"]) + LEGEND,
    "topo -p2p r": matrix(["GPU0 X GNS", "GPU1 GNS X"], end="") + "\nLegend:\n\n  X    = Self\n",
}
MIG = {
    "-q -x": log(
        "580.95.05",
        "13.0",
        gpu(
            "NVIDIA H100 PCIe", "81559 MiB", "N/A", mig="Enabled", slices=slice_of(0) + slice_of(1)
        ),
    ),
    "--query-gpu=index,compute_cap --format=csv,noheader": "0, 9.0\n",
}
EXCLUSIVE = {
    "-q -x": log(
        "580.82.07",
        "13.0",
        gpu("NVIDIA L40S", "46068 MiB", "1 MiB", "Exclusive_Process"),
        gpu("NVIDIA L40S", "46068 MiB", "4711 MiB", "Exclusive_Process"),
        gpu("NVIDIA L40S", "46068 MiB", "1 MiB", "Prohibited"),
    ),
    "--query-gpu=index,compute_cap --format=csv,noheader": "0, 8.9\n1, 8.9\n2, 8.9\n",
    "topo -m": matrix(
        ["GPU0 X PIX NODE 0-31 0 N/A", "GPU1 PIX X NODE 0-31 0 N/A", "GPU2 NODE NODE X 0-31 0 N/A"]
    ),
    "topo -p2p r": matrix(["GPU0 X OK OK", "GPU1 OK X OK", "GPU2 OK OK X"], end=""),
}
# Before CUDA's version was told, and before MIG.
OLD = {
    "-q -x": log("384.130", "", gpu("Tesla K80", "11439 MiB", "0 MiB", mig="", uuid="GPU-k80")),
    "--query-gpu=index,compute_cap --format=csv,noheader": (
        2,
        'Field "compute_cap" is not a valid field to query.\n',
    ),
}
NO_DRIVER = {
    "-q -x": (
        9,
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
        "that the latest NVIDIA driver is installed and running.\n\n",
    )
}
MACHINES = {
    "DGX": DGX,
    "four V100": FOUR_V100,
    "two over PCIe": PCIE,
    "MIG": MIG,
    "exclusive": EXCLUSIVE,
    "old driver": OLD,
    "no driver": NO_DRIVER,
}


def write_program(folder: Path, answers: dict) -> Path:
    """Write an ``nvidia-smi`` that gives these answers: a text, or (exit code, text)."""
    cases = []
    for number, (words, answer) in enumerate(answers.items()):
        code, text = answer if isinstance(answer, tuple) else (0, answer)
        file = folder / f"answer_{number}"
        file.write_text(text)
        cases.append(f'"{words}") cat {file}; exit {code};;')
    text = 'case "$*" in\n' + "\n".join(cases) + '\nesac\necho "ERROR: Option not known"; exit 2\n'
    return program(folder, text)


def program(folder: Path, script: str) -> Path:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file
