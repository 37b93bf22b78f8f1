"""The processes of a run: their start, their messages, their failures.

comm       the operations of a rank, and what moves the bytes
runtime    from a function to P processes and back
tracing    the work of each rank over time: recorded, read from files, explained
devices    the hardware of this machine, and what each rank gets of it (gpus: its GPUs)
errors     the errors that end a run
files      files that are written whole
started    what a launcher says of a process: which rank it is
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["devices", "gpus", "tracing"]
)
