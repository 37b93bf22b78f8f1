"""Pretended GPUs: what torch does on a machine with N GPUs, with tensors in host memory.

What holds, so that the code for GPUs runs as it would:

* ``torch.cuda`` shows N GPUs (fewer with ``CUDA_VISIBLE_DEVICES``), with events, streams, a
  current device per thread, properties and memory in use.
* Each storage has a label, ``cpu`` or ``cuda:k``, that ``.device`` and ``.is_cuda`` show. Results
  have the label of their operands; operands on two devices raise, as does ``.numpy()`` of a tensor
  on a GPU, or a GPU that does not exist.
* ``init_process_group("nccl")`` and ``new_group`` are gloo underneath, and say nccl. On nccl a
  tensor on the CPU raises, on gloo a GPU's tensor in ``send`` and ``recv`` does.
* ``autocast("cuda")``, ``GradScaler``, DDP with ``device_ids``, and ``nn.DataParallel`` work.
* CUDA is initialized by the first use, and a fork after that cannot use it. A notebook's kernel
  that initializes CUDA ends in an error: labkit promises that it never does.

What does not: everything is done when a call returns (nothing overlaps, a send waits for its
receive as gloo's does), there are no kernels of NVIDIA's libraries, no TF32, no CUDA graphs, and
no ``nvidia-smi``. Where C++ makes a tensor that Python has not seen (a gradient inside a backward
pass) it has no label yet: its device is then shown as this thread's current GPU.
"""

import os
import sys
import threading
import warnings

import torch

CPU = torch.device("cpu")
_state = threading.local()
_process = {"initialized": False, "forked": False}


def num_gpus():
    """How many GPUs this process sees, as CUDA counts: up to the first number it does not know."""
    pretended = int(os.environ.get("LABKIT_PRETEND_GPUS") or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pretended
    seen = []
    for word in visible.split(","):
        word = word.strip()
        if not word.isdigit() or int(word) >= pretended or word in seen:
            break
        seen.append(word)
    return len(seen)


def initialize():
    """What the first use of CUDA in a process does.

    Raises:
        RuntimeError: in a process forked after that, in a notebook's kernel, or without GPUs.
    """
    if _process["initialized"]:
        return
    if _process["forked"]:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
            "you must use the 'spawn' start method"
        )
    if not num_gpus():
        raise RuntimeError("No CUDA GPUs are available")
    if any("ipykernel" in word for word in sys.orig_argv):
        raise RuntimeError("pretended GPUs: the notebook's kernel has initialized CUDA")
    _process["initialized"] = True


def _after_fork():
    if _process["initialized"]:
        _process.update(initialized=False, forked=True)


def is_initialized():
    return _process["initialized"]


def in_bad_fork():
    return _process["forked"]


def current():
    """The number of this thread's current GPU."""
    return getattr(_state, "device", 0)


def make_current(index):
    """Make a GPU this thread's current one; -1 changes nothing. Returns the one before."""
    before = current()
    if index >= 0:
        _state.device = checked(torch.device("cuda", index)).index
    return before


def checked(device):
    """A GPU's device with its number, after CUDA has been initialized.

    Raises:
        RuntimeError: there is no such GPU.
    """
    initialize()
    index = current() if device.index is None else device.index
    if index >= num_gpus():
        raise RuntimeError(
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have "
            f"enough GPUs? (cuda:{index} of {num_gpus()} pretended GPUs)"
        )
    return torch.device("cuda", index)


def resolved(device):
    """The device that a user names (1, ``"cuda"``, ``torch.device``), with its number."""
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device("cuda", device)
    device = torch.device(device)
    return checked(device) if device.type == "cuda" else device


def install():
    """Change torch in this process; called once, after its import."""
    import pretended_cuda
    import pretended_groups
    import pretended_labels

    os.register_at_fork(after_in_child=_after_fork)
    pretended_cuda.install()
    pretended_labels.install()
    pretended_groups.install()
    _threads_pretend_too()
    warnings.filterwarnings("ignore", message=".*no accelerator is found.*")


def _threads_pretend_too():
    """The mode that follows labels belongs to a thread: enter it in each that Python starts."""
    import pretended_labels

    bootstrap = threading.Thread._bootstrap_inner

    def _bootstrap_inner(self):
        with pretended_labels.active():
            bootstrap(self)

    threading.Thread._bootstrap_inner = _bootstrap_inner
    pretended_labels.MODE.__enter__()
