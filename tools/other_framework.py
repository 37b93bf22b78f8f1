"""Make the environment of another framework: ``make horovod``, ``make tensorflow``.

The packages come from tools/horovod.txt or tools/tensorflow.txt, each file checked by its hash;
Horovod is then compiled, and at the end what was made is tried. uv and the compiler say themselves
what they lack. The stamp is written last, so nobody takes a folder for ready that is not; the next
call begins anew with the packages in uv's cache.
``environments.py`` tells whether an environment is ready.
"""

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch_build
from environments import FRAMEWORKS, environment_of, stamp, why_not

ROOT = Path(__file__).resolve().parents[1]
UV = ROOT / ".venv" / "bin" / "uv"
# The newest Python for which the pinned packages have files.
PYTHONS = {"horovod": "3.11", "tensorflow": ">=3.11,<3.14"}
CHECK_S = 600
# Horovod reads its switches from the environment: gloo between workers on CPUs, nothing else.
SWITCHES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
    # Its build files are older than what today's CMake accepts by itself.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    # Which GCC 13 and newer no longer include by the way.
    "CXXFLAGS": "-include cstdint",
    # A compiler takes 1.5 GB.
    "MAKEFLAGS": "-j2",
}
# Of the shell: these would build another Horovod.
NOT_OURS = ("HOROVOD_", "CUDA_HOME", "CC", "CXX", "NVCC")
SUM_OF_TWO = """\
import horovod.torch as hvd, torch
hvd.init()
print("sum", hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item())"""
TWO_DEVICES = """\
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
print("devices", len(tf.config.list_logical_devices("CPU")))"""
WORKERS = ("horovodrun", "--gloo", "--disable-cache", "-np", "2", "python", "-c")
# A command of the environment, and what it must print.
CHECKS = {
    "horovod": ((*WORKERS, SUM_OF_TWO), "[1]<stdout>:sum 3.0"),
    "tensorflow": (("python", "-c", TWO_DEVICES), "devices 2"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment of another framework.")
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--python", help="the Python to make it with")
    parser.add_argument("--torch", default="default", help="the build of PyTorch in .venv")
    given = parser.parse_args()
    framework = given.framework
    with (ROOT / "tools" / f"{framework}.txt").open() as lock:
        # Another call may be making it: the lock ends with that process.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not why_not(framework, ROOT):
            return 0
        try:
            make(framework, given.python or PYTHONS[framework], given.torch)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"make {framework}: not made, see above ({error})", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print(f"make {framework}: {environment_of(framework, ROOT).name} is ready", flush=True)
    return 0


def make(framework: str, python: str, torch: str) -> None:
    """Make the environment, and write its stamp.

    Raises:
        subprocess.SubprocessError: a command failed, and has said why.
    """
    folder, made_of = environment_of(framework, ROOT), stamp(framework, ROOT)
    if folder.is_symlink():  # what it leads to belongs to another clone
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    pins = torch_build.entries(ROOT / "tools" / f"{framework}.txt")
    hashes = ["--require-hashes"]
    if torch != "default":
        # Every other build than the index's is in PyTorch's own index, which then is in reach.
        pins = torch_build.of_another_build(pins)
        hashes = ["--torch-backend", "cpu", "--verify-hashes"]
    compiled = [pin for pin in pins if pin.startswith("horovod==")]

    def install(entries: list[str], *options: str, **environment: str) -> None:
        (folder / "pins.txt").write_text("\n".join(entries) + "\n")
        own = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}
        words = [UV, "pip", "install", "--python", folder / "bin" / "python", "--no-deps"]
        words += [*hashes, *options, "-r", folder / "pins.txt"]
        subprocess.run(words, env=own | environment, check=True)

    subprocess.run([UV, "venv", "--no-project", "--python", python, folder], check=True)
    install([pin for pin in pins if pin not in compiled], "--compile-bytecode")
    if compiled:
        for version in folder.glob("lib/python*/site-packages/torch/version.py"):
            # Or Horovod compiles for CUDA where it finds a toolkit. The file is replaced: it may
            # be one file with that of uv's cache.
            text = re.sub(r"(?m)^cuda\b.*", "cuda = None", version.read_text())
            version.unlink()
            version.write_text(text)
        print("compiling Horovod: some 4 minutes on two quiet cores", flush=True)
        # Not from uv's cache: it may hold a Horovod compiled with other switches.
        install(compiled, "--no-build-isolation", "--no-cache", **SWITCHES)
    words, expected = CHECKS[framework]
    search = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    tried = subprocess.run(
        [folder / "bin" / words[0], *words[1:]],
        env=os.environ | {"PATH": search},
        capture_output=True,
        text=True,
        timeout=CHECK_S,
    )
    if expected not in tried.stdout:
        print(tried.stdout, tried.stderr, file=sys.stderr)
        raise OSError(f"{words[0]} does not work in what was made")
    (folder / ".ready").write_text("\n".join(made_of) + "\n")


if __name__ == "__main__":
    sys.exit(main())
