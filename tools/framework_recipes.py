"""What each other framework needs: ``tools/other_framework.py`` makes its environment of it."""

from dataclasses import dataclass

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
}
TWO_WORKERS = ("horovodrun", "--gloo", "--disable-cache", "-np", "2")
SUM_OF_TWO = """\
import horovod.torch as hvd, torch
hvd.init()
print("sum", hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item())"""
TWO_DEVICES = """\
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
print("devices", len(tf.config.list_logical_devices("CPU")))"""


@dataclass(frozen=True)
class Recipe:
    """What a framework needs.

    Attributes:
        title: its name in sentences.
        pythons: the oldest and the newest Python that its pinned packages have files for.
        because: what sets the newest one.
        disk_gb: the size of the environment while it is made.
        checks: commands of the environment, each with the texts that it must print.
        compiled: the package that is compiled here; empty if there is none.
        memory_gb: what one compiler needs.
    """

    title: str
    pythons: tuple[tuple[int, int], tuple[int, int]]
    because: str
    disk_gb: float
    checks: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    compiled: str = ""
    memory_gb: float = 0

    @property
    def python(self) -> str:
        """The newest Python, as in ``python3.11``."""
        return ".".join(map(str, self.pythons[1]))

    @property
    def needs(self) -> str:
        """Which Python, in words."""
        oldest = ".".join(map(str, self.pythons[0]))
        which = self.python if oldest == self.python else f"{oldest} to {self.python}"
        return f"{self.title} needs Python {which} ({self.because})"


RECIPES = {
    "horovod": Recipe(
        "Horovod",
        ((3, 11), (3, 11)),
        "torch 2.0.1, the newest that it compiles with, has files for no newer one",
        disk_gb=5,
        checks=(
            (("horovodrun", "--check-build"), ("[X] PyTorch", "[X] Gloo")),
            (
                (*TWO_WORKERS, "python", "-c", SUM_OF_TWO),
                ("[0]<stdout>:sum 3.0", "[1]<stdout>:sum 3.0"),
            ),
        ),
        compiled="horovod",
        memory_gb=1.5,
    ),
    "tensorflow": Recipe(
        "TensorFlow",
        ((3, 11), (3, 13)),
        "its packages have files for no newer one",
        disk_gb=2,
        checks=((("python", "-c", TWO_DEVICES), ("devices 2",)),),
    ),
}
