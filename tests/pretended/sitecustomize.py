"""Pretended GPUs, for tests: ``LABKIT_PRETEND_GPUS=2 PYTHONPATH=tests/pretended python ...``

Every Python process that inherits these two variables (a kernel, the forkserver and its ranks,
torchrun's workers) then behaves as on a machine with that many
GPUs, while tensors stay in host memory and the CPU computes. See ``pretended_gpus``.

Python imports a module of this name at every start. A process that never imports torch pays next
to nothing: the changes are made when torch has been imported.
"""

import os
import sys
from importlib.machinery import PathFinder


class AfterTorch:
    """A finder that changes torch as soon as it has been imported."""

    def find_spec(self, name, path=None, target=None):
        """Torch's own spec, with a loader that also makes the changes."""
        if name != "torch" or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        sys.meta_path.remove(self)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            import pretended_gpus

            pretended_gpus.install()

        spec.loader.exec_module = execute_and_change
        return spec


def show_a_driver():
    """Let this process see the file of NVIDIA's driver."""
    exists = os.path.exists
    os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)


if int(os.environ.get("LABKIT_PRETEND_GPUS") or 0):
    show_a_driver()
    sys.meta_path.insert(0, AfterTorch())
